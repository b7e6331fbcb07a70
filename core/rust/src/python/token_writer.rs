//! Python class that writes single tokens of a worker's output to a client.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyList};

use super::observations::Observations;
use crate::hash::TOKEN_BYTES;
use crate::outputs;
use crate::token_events::TokenEvents;

/// Implements `kvrouter.core.reference.TokenWriter`.
#[pyclass(module = "kvrouter.core._native")]
pub struct TokenWriter {
    pending: Py<PyDict>,
    wake: Py<PyAny>,
    transport: Py<PyAny>,
    protocol: Py<PyAny>,
    events: TokenEvents,
    latency: Option<Py<Observations>>,
    #[pyo3(get, set)]
    worker: Option<Py<PyAny>>,
    #[pyo3(get, set)]
    limit: u64,
    #[pyo3(get)]
    last_ns: i64,
    #[pyo3(get)]
    total: u64,
    /// Little-endian u32.
    taken: Vec<u8>,
}

impl TokenWriter {
    /// Takes a response as `take` does. `clock` has the time, once it was read.
    pub fn offer(&mut self, py: Python<'_>, response: &[u8], clock: &mut Option<i64>) -> PyResult<bool> {
        let (1.., Some(latency), Some(worker)) = (self.limit, &self.latency, &self.worker) else {
            return Ok(false);
        };
        let (Some(token), worker) = (outputs::only_token(response), worker.bind(py)) else { return Ok(false) };
        let is_paused = self.protocol.bind(py).getattr(intern!(py, "writing_paused"))?.is_truthy()?;
        if is_paused || worker.getattr(intern!(py, "missed"))?.is_truthy()? {
            return Ok(false);
        }
        self.write(py, token)?;
        count_piece(worker)?;
        let now_ns = if let Some(now_ns) = *clock { now_ns } else { *clock.insert(clock_ns(py)?) };
        latency.borrow_mut(py).observe((now_ns - self.last_ns) as f64 / 1e9, 1);
        self.last_ns = now_ns;
        self.limit -= 1;
        self.total += 1;
        self.taken.extend_from_slice(&token.to_le_bytes());
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
    ) -> Self {
        let events = TokenEvents::new(before, after, are_chunks);
        let (latency, worker, taken) = (None, None, Vec::new());
        Self { pending, wake, transport, protocol, events, latency, worker, limit: 0, last_ns: 0, total: 0, taken }
    }

    fn begin(&mut self, limit: u64, last_ns: i64, latency: Py<Observations>) {
        (self.limit, self.last_ns, self.latency) = (limit, last_ns, Some(latency));
    }

    fn take(&mut self, py: Python<'_>, response: &[u8]) -> PyResult<bool> {
        self.offer(py, response, &mut None)
    }

    fn taken<'py>(&mut self, py: Python<'py>) -> (usize, Bound<'py, PyBytes>) {
        let taken = (self.taken.len() / TOKEN_BYTES, PyBytes::new(py, &self.taken));
        self.taken.clear();
        taken
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pending)?;
        visit.call(&self.wake)?;
        visit.call(&self.transport)?;
        visit.call(&self.worker)?;
        visit.call(&self.protocol)
    }
}

/// Counts a piece of a worker's output.
pub fn count_piece(worker: &Bound<'_, PyAny>) -> PyResult<()> {
    let pieces = intern!(worker.py(), "pieces");
    worker.setattr(pieces, worker.getattr(pieces)?.extract::<u64>()? + 1)
}

/// Returns the time by Python's clock, which callers measure with too.
pub fn clock_ns(py: Python<'_>) -> PyResult<i64> {
    static CLOCK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    CLOCK.import(py, "time", "perf_counter_ns")?.call0()?.extract()
}
