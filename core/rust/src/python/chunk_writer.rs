//! Python class that gives a client the chunks of an engine's stream.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::output_writer::OutputWriter;
use crate::event_chunks::count_tokens;

/// Implements `kvrouter.core.reference.ChunkWriter`.
#[pyclass(module = "kvrouter.core._native", extends = OutputWriter)]
pub struct ChunkWriter {
    pending: Py<PyDict>,
    transport: Py<PyAny>,
}

#[pymethods]
impl ChunkWriter {
    #[new]
    fn new(pending: Py<PyDict>, transport: Py<PyAny>, protocol: Py<PyAny>) -> PyClassInitializer<Self> {
        PyClassInitializer::from(OutputWriter::new(protocol)).add_subclass(Self { pending, transport })
    }

    fn take(mut slf: PyRefMut<'_, Self>, py: Python<'_>, piece: &Bound<'_, PyBytes>) -> PyResult<bool> {
        let Some(tokens) = count_tokens(piece.as_bytes()) else { return Ok(false) };
        if !slf.as_super().may_take(py, tokens)? {
            return Ok(false);
        }
        let (pending, transport) = (slf.pending.bind(py), slf.transport.bind(py));
        if (!pending.is_empty() && pending.contains(transport)?)
            || transport.call_method0(intern!(py, "is_closing"))?.is_truthy()?
        {
            return Ok(false);
        }
        transport.call_method1(intern!(py, "write"), (piece,))?;
        slf.as_super().count(py, tokens, &mut None)?;
        Ok(true)
    }

    fn taken(mut slf: PyRefMut<'_, Self>, py: Python<'_>) -> (u64, Py<PyBytes>) {
        (slf.as_super().end(), PyBytes::new(py, b"").unbind())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pending)?;
        visit.call(&self.transport)
    }
}
