//! Python class for the event log of a publisher's rank, and a function that encodes its batches.

use std::collections::VecDeque;

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::exclusive::Exclusive;
use super::rank_state::{Event, encoded};
use crate::publisher::{self, BatchHead, NumberedEvent};

/// Number of events from which a call releases the GIL: it takes about 20 µs.
const LONG: usize = 512;

/// Implements `kvrouter.publisher.events.event_log.EventLog` for tuples of id, encoded KvEvent, and digest after it.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct EventLog {
    log: Exclusive<publisher::EventLog>,
}

#[pymethods]
impl EventLog {
    #[new]
    fn new(max_events: usize, max_bytes: usize) -> Self {
        Self { log: Exclusive::new(publisher::EventLog::new(max_events, max_bytes)) }
    }

    /// Returns dropped events, unsent events, and the bytes of those.
    fn counts(&self, py: Python<'_>) -> (u64, usize, usize) {
        self.log.with(py, false, |log| (log.dropped, log.unsent(), log.unsent_bytes))
    }

    fn waiting<'py>(&self, py: Python<'py>) -> Vec<Event<'py>> {
        let events: Vec<_> = self.log.with(py, false, |log| log.waiting().cloned().collect());
        encoded(py, events)
    }

    fn extend(&self, py: Python<'_>, events: Vec<Event<'_>>) {
        let events = numbered(&events);
        let long = events.len() > LONG;
        self.log.with(py, long, |log| log.extend(events));
    }

    fn take<'py>(&self, py: Python<'py>, max_bytes: usize) -> Vec<Event<'py>> {
        let events = self.log.with(py, false, |log| log.take(max_bytes));
        encoded(py, events)
    }

    /// Returns an iterator of runs of events. Raises KeyError if the first event is not in the log.
    fn since(&self, py: Python<'_>, event_id: u64, until: u64, max_bytes: usize) -> PyResult<EventRuns> {
        let runs = self.log.with(py, true, |log| log.since(event_id, until, max_bytes));
        let runs = runs.map_err(|error| PyKeyError::new_err(error.to_string()))?;
        Ok(EventRuns { runs: Exclusive::new(runs.into()) })
    }
}

/// Runs of events. The bytes of each are copied when it is read.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct EventRuns {
    runs: Exclusive<VecDeque<Vec<NumberedEvent>>>,
}

#[pymethods]
impl EventRuns {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> Option<Vec<Event<'py>>> {
        self.runs.with(py, false, VecDeque::pop_front).map(|run| encoded(py, run))
    }
}

/// Worker id, rank, incarnation, block size and CopyCounting.
type Head = (u64, u32, u64, u32, i32);

/// Returns an encoded KvEventBatch.
#[pyfunction]
pub fn encode_event_batch<'py>(
    py: Python<'py>,
    head: Head,
    events: Vec<Event<'py>>,
    next_event_id: u64,
    digest: u64,
    published_unix_ns: u64,
) -> Bound<'py, PyBytes> {
    let (worker_id, dp_rank, incarnation, block_size, counting) = head;
    let head = BatchHead { worker_id, dp_rank, incarnation, block_size, counting };
    PyBytes::new(py, &publisher::encode_batch(&head, &numbered(&events), next_event_id, digest, published_unix_ns))
}

fn numbered(events: &[Event<'_>]) -> Vec<NumberedEvent> {
    let numbered = |(id, encoded, digest): &Event<'_>| NumberedEvent {
        id: *id,
        encoded: encoded.as_bytes().into(),
        digest: *digest,
    };
    events.iter().map(numbered).collect()
}
