//! Python iterator over the chunks of a dump.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Encoded chunks. Each is copied to a Python object when it is read, so that no call holds the GIL for a whole dump.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct DumpChunks(Mutex<Box<dyn Iterator<Item = Vec<u8>> + Send>>);

impl DumpChunks {
    /// Takes each chunk from the iterator when it is read.
    pub fn new(chunks: impl Iterator<Item = Vec<u8>> + Send + 'static) -> Self {
        Self(Mutex::new(Box::new(chunks)))
    }
}

#[pymethods]
impl DumpChunks {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let chunk = py.detach(|| self.0.lock().unwrap_or_else(PoisonError::into_inner).next())?;
        Some(PyBytes::new(py, &chunk))
    }
}
