//! Python class with what writers of a worker's output share.

use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use super::observations::Observations;

/// Implements `kvrouter.core.reference.OutputWriter`.
#[pyclass(module = "kvrouter.core._native", subclass)]
pub struct OutputWriter {
    protocol: Py<PyAny>,
    latency: Option<Py<Observations>>,
    report: Option<Py<PyAny>>,
    room: u64,
    tokens: u64,
    #[pyo3(get, set)]
    worker: Option<Py<PyAny>>,
    #[pyo3(get, set)]
    limit: u64,
    #[pyo3(get)]
    last_ns: i64,
}

impl OutputWriter {
    pub fn new(protocol: Py<PyAny>) -> Self {
        Self { protocol, latency: None, report: None, room: 0, tokens: 0, worker: None, limit: 0, last_ns: 0 }
    }

    /// Returns whether it may take a piece of so many tokens.
    pub fn may_take(&self, py: Python<'_>, tokens: u64) -> PyResult<bool> {
        let (Some(worker), Some(_), 1..) = (&self.worker, &self.latency, tokens) else { return Ok(false) };
        Ok(tokens <= self.limit
            && !self.protocol.bind(py).getattr(intern!(py, "writing_paused"))?.is_truthy()?
            && !worker.bind(py).getattr(intern!(py, "missed"))?.is_truthy()?)
    }

    /// Counts a piece of so many tokens, which `may_take` allowed. `clock` has the time, once it was read.
    pub fn count(&mut self, py: Python<'_>, tokens: u64, clock: &mut Option<i64>) -> PyResult<()> {
        if let Some(worker) = &self.worker {
            let (worker, pieces) = (worker.bind(py), intern!(py, "pieces"));
            worker.setattr(pieces, worker.getattr(pieces)?.extract::<u64>()? + 1)?;
        }
        let now_ns = if let Some(now_ns) = *clock { now_ns } else { *clock.insert(clock_ns(py)?) };
        if let Some(latency) = &self.latency {
            let seconds = (now_ns - self.last_ns) as f64 / 1e9;
            latency.borrow_mut(py).observe(seconds, u32::try_from(tokens).unwrap_or(u32::MAX));
        }
        self.last_ns = now_ns;
        self.limit -= tokens;
        self.tokens += tokens;
        if let Some(report) = self.report.as_ref().filter(|_| self.tokens > self.room) {
            self.room = report.call1(py, (self.tokens,))?.extract(py)?;
        }
        Ok(())
    }

    /// Takes no further tokens. Returns the number of those taken.
    pub fn end(&mut self) -> u64 {
        (self.latency, self.report) = (None, None);
        std::mem::take(&mut self.tokens)
    }
}

#[pymethods]
impl OutputWriter {
    fn begin(&mut self, room: u64, last_ns: i64, latency: Py<Observations>, report: Py<PyAny>) {
        (self.room, self.last_ns) = (room, last_ns);
        (self.latency, self.report) = (Some(latency), Some(report));
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.worker)?;
        visit.call(&self.report)?;
        visit.call(&self.protocol)
    }
}

/// Returns the time by Python's clock, which callers measure with too.
fn clock_ns(py: Python<'_>) -> PyResult<i64> {
    static CLOCK: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    CLOCK.import(py, "time", "perf_counter_ns")?.call0()?.extract()
}
