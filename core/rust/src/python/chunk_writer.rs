//! Python class that gives a client the chunks of an engine's stream.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::observations::Observations;
use super::token_writer::{clock_ns, count_piece};
use crate::event_chunks::count_tokens;

/// Implements `kvrouter.core.reference.ChunkWriter`.
#[pyclass(module = "kvrouter.core._native")]
pub struct ChunkWriter {
    pending: Py<PyDict>,
    transport: Py<PyAny>,
    protocol: Py<PyAny>,
    latency: Option<Py<Observations>>,
    #[pyo3(get, set)]
    worker: Option<Py<PyAny>>,
    #[pyo3(get, set)]
    limit: u64,
    #[pyo3(get)]
    last_ns: i64,
    taken: u64,
}

#[pymethods]
impl ChunkWriter {
    #[new]
    fn new(pending: Py<PyDict>, transport: Py<PyAny>, protocol: Py<PyAny>) -> Self {
        Self { pending, transport, protocol, latency: None, worker: None, limit: 0, last_ns: 0, taken: 0 }
    }

    fn begin(&mut self, limit: u64, last_ns: i64, latency: Py<Observations>) {
        (self.limit, self.last_ns, self.latency) = (limit, last_ns, Some(latency));
    }

    fn take(&mut self, py: Python<'_>, chunks: &Bound<'_, PyBytes>) -> PyResult<bool> {
        let (Some(latency), Some(worker)) = (&self.latency, &self.worker) else { return Ok(false) };
        let (Some(tokens @ 1..), worker) = (count_tokens(chunks.as_bytes()), worker.bind(py)) else {
            return Ok(false);
        };
        let (pending, transport) = (self.pending.bind(py), self.transport.bind(py));
        if tokens > self.limit
            || self.protocol.bind(py).getattr(intern!(py, "writing_paused"))?.is_truthy()?
            || worker.getattr(intern!(py, "missed"))?.is_truthy()?
            || (!pending.is_empty() && pending.contains(transport)?)
            || transport.call_method0(intern!(py, "is_closing"))?.is_truthy()?
        {
            return Ok(false);
        }
        transport.call_method1(intern!(py, "write"), (chunks,))?;
        count_piece(worker)?;
        let now_ns = clock_ns(py)?;
        latency.borrow_mut(py).observe((now_ns - self.last_ns) as f64 / 1e9, u32::try_from(tokens).unwrap_or(u32::MAX));
        self.last_ns = now_ns;
        self.limit -= tokens;
        self.taken += tokens;
        Ok(true)
    }

    fn taken(&mut self, py: Python<'_>) -> (u64, Py<PyBytes>) {
        (std::mem::take(&mut self.taken), PyBytes::new(py, b"").unbind())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pending)?;
        visit.call(&self.transport)?;
        visit.call(&self.worker)?;
        visit.call(&self.protocol)
    }
}
