//! Python class that writes single tokens of a worker's output to a client.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use super::output_writer::OutputWriter;
use crate::outputs;
use crate::token_events::TokenEvents;

/// Implements `kvrouter.core.reference.TokenWriter`.
#[pyclass(module = "kvrouter.core._native", extends = OutputWriter)]
pub struct TokenWriter {
    pending: Py<PyDict>,
    wake: Py<PyAny>,
    transport: Py<PyAny>,
    events: TokenEvents,
    #[pyo3(get)]
    total: u64,
    /// Little-endian u32.
    taken: Vec<u8>,
}

impl TokenWriter {
    /// Takes a piece as `take` does. `clock` has the time, once it was read.
    pub fn offer(mut slf: PyRefMut<'_, Self>, py: Python<'_>, piece: &[u8], clock: &mut Option<i64>) -> PyResult<bool> {
        let Some(token) = outputs::only_token(piece) else { return Ok(false) };
        if !slf.as_super().may_take(py, 1)? {
            return Ok(false);
        }
        slf.write(py, token)?;
        slf.as_super().count(py, 1, clock)?;
        slf.total += 1;
        slf.taken.extend_from_slice(&token.to_le_bytes());
        Ok(true)
    }

    /// Writes the event of a token.
    fn write(&self, py: Python<'_>, token: u32) -> PyResult<()> {
        let event = PyBytes::new(py, &self.events.event(token));
        let (pending, transport) = (self.pending.bind(py), self.transport.bind(py));
        if let Some(events) = pending.get_item(transport)? {
            return events.cast::<PyList>()?.append(event);
        }
        if pending.is_empty() {
            self.wake.call0(py)?;
        }
        pending.set_item(transport, PyList::new(py, [event])?)
    }
}

#[pymethods]
impl TokenWriter {
    #[new]
    #[pyo3(signature = (pending, wake, transport, protocol, before, after, *, are_chunks))]
    fn new(
        pending: Py<PyDict>,
        wake: Py<PyAny>,
        transport: Py<PyAny>,
        protocol: Py<PyAny>,
        before: &[u8],
        after: &[u8],
        are_chunks: bool,
    ) -> PyClassInitializer<Self> {
        let events = TokenEvents::new(before, after, are_chunks);
        let writer = Self { pending, wake, transport, events, total: 0, taken: Vec::new() };
        PyClassInitializer::from(OutputWriter::new(protocol)).add_subclass(writer)
    }

    fn take(slf: PyRefMut<'_, Self>, py: Python<'_>, piece: &[u8]) -> PyResult<bool> {
        Self::offer(slf, py, piece, &mut None)
    }

    fn taken<'py>(mut slf: PyRefMut<'py, Self>, py: Python<'py>) -> (u64, Bound<'py, PyBytes>) {
        let token_ids = PyBytes::new(py, &slf.taken);
        slf.taken.clear();
        (slf.as_super().end(), token_ids)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pending)?;
        visit.call(&self.wake)?;
        visit.call(&self.transport)
    }
}
