//! Python class for the blocks and events of a publisher's rank.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::{Hashes, immutable, pack, words};
use super::dump::DumpChunks;
use super::exclusive::Exclusive;
use super::interface;
use crate::publisher::{self, BatchHead, Error, Scope};
use crate::wire::{Malformed, RankState};

/// Number of blocks from which a call releases the GIL: it takes about 20 µs.
const LONG: usize = 128;

/// Worker id, rank, incarnation, block size and CopyCounting.
type Head = (u64, u32, u64, u32, i32);
/// Scope, parts and packed engine hashes.
type Note<'py> = (Bound<'py, PyAny>, u32, Bound<'py, PyAny>);

/// Implements `kvrouter.core.interface.EventRecorder`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct EventRecorder {
    recorder: Exclusive<publisher::EventRecorder>,
    /// The class `kvrouter.core.interface.RecorderCounts`.
    counts: Py<PyAny>,
}

impl EventRecorder {
    /// Records a report. Returns the counts after it.
    fn record<'py>(
        &self,
        py: Python<'py>,
        blocks: usize,
        report: impl FnOnce(&mut publisher::EventRecorder) -> Result<(), Error> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let counts = self.recorder.with(py, blocks > LONG, |recorder| report(recorder).map(|()| counts_of(recorder)));
        self.counts.bind(py).call1(counts.map_err(|error| raised(py, error))?)
    }
}

#[pymethods]
impl EventRecorder {
    #[new]
    fn new(py: Python<'_>, head: Head, max_events: usize, max_bytes: usize) -> PyResult<Self> {
        let (worker_id, dp_rank, incarnation, block_size, counting) = head;
        let head = BatchHead { worker_id, dp_rank, incarnation, block_size, counting };
        let recorder = Exclusive::new(publisher::EventRecorder::new(head, max_events, max_bytes));
        Ok(Self { recorder, counts: interface(py, "RecorderCounts")?.unbind() })
    }

    fn counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.record(py, 0, |_| Ok(()))
    }

    fn resident(&self, py: Python<'_>, engine_hashes: Hashes, tier: i32) -> PyResult<Vec<u64>> {
        let resident = self.recorder.with(py, engine_hashes.0.len() > LONG, |recorder| {
            let is_resident = |hash: &u64| recorder.state().is_resident(*hash, tier).map(|yes| yes.then_some(*hash));
            engine_hashes.0.iter().filter_map(|hash| is_resident(hash).transpose()).collect::<Result<_, _>>()
        });
        resident.map_err(|error| raised(py, error))
    }

    fn scope_of<'py>(&self, py: Python<'py>, engine_hash: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let scope = self.recorder.with(py, false, |recorder| Some(recorder.state().get(engine_hash)?.scope()));
        scope.map(|scope| scope_object(py, scope)).transpose()
    }

    fn chunk(&self, py: Python<'_>, engine_hash: u64, blocks: usize) -> Vec<u64> {
        self.recorder.with(py, false, |recorder| recorder.state().chunk(engine_hash, blocks))
    }

    #[allow(clippy::too_many_arguments)] // one report of an engine, as it comes
    #[pyo3(signature = (engine_hashes, local_hashes, parent, tier, *, scope=None, new_copies=true, parts=1))]
    fn stored<'py>(
        &self,
        py: Python<'py>,
        engine_hashes: Hashes,
        local_hashes: &Bound<'py, PyAny>,
        parent: Option<u64>,
        tier: i32,
        scope: Option<&Bound<'py, PyAny>>,
        new_copies: bool,
        parts: u32,
    ) -> PyResult<Bound<'py, PyAny>> {
        let engine_hashes = engine_hashes.0;
        let locals = words(local_hashes).map_err(|error| match error.is_instance_of::<PyValueError>(py) {
            true => raised(py, Error::Invalid(error.value(py).to_string())),
            false => error,
        })?;
        let scope = scope.map(scope_in).transpose()?.flatten();
        self.record(py, locals.len(), |recorder| {
            recorder.stored(&engine_hashes, &locals, parent, tier, scope, new_copies, parts)
        })
    }

    fn stored_in_tier<'py>(&self, py: Python<'py>, engine_hashes: Hashes, tier: i32) -> PyResult<Bound<'py, PyAny>> {
        self.record(py, engine_hashes.0.len(), |recorder| recorder.stored_in_tier(&engine_hashes.0, tier))
    }

    fn removed<'py>(&self, py: Python<'py>, engine_hashes: Hashes, tier: i32) -> PyResult<Bound<'py, PyAny>> {
        self.record(py, engine_hashes.0.len(), |recorder| recorder.removed(&engine_hashes.0, tier))
    }

    fn cleared<'py>(&self, py: Python<'py>, tier: i32) -> PyResult<Bound<'py, PyAny>> {
        self.record(py, usize::MAX, |recorder| recorder.cleared(tier))
    }

    fn begin(&self, py: Python<'_>) {
        self.recorder.with(py, false, publisher::EventRecorder::begin);
    }

    fn commit(&self, py: Python<'_>) {
        self.recorder.with(py, false, publisher::EventRecorder::commit);
    }

    fn roll_back(&self, py: Python<'_>) {
        self.recorder.with(py, true, publisher::EventRecorder::roll_back);
    }

    fn take_batch<'py>(&self, py: Python<'py>, max_bytes: usize) -> (u64, u64, Bound<'py, PyBytes>) {
        let batch = self.recorder.with(py, false, |recorder| recorder.take_batch(max_bytes, unix_ns()));
        (batch.first_event_id, batch.next_event_id, PyBytes::new(py, &batch.encoded))
    }

    #[pyo3(signature = (from_event_id, until_event_id=0))]
    fn batches(&self, py: Python<'_>, from_event_id: u64, until_event_id: u64) -> PyResult<DumpChunks> {
        let batches =
            self.recorder.with(py, true, |recorder| recorder.batches(from_event_id, until_event_id, unix_ns()));
        Ok(DumpChunks::new(batches.map_err(|error| raised(py, error))?))
    }

    #[pyo3(signature = (chunk_blocks=publisher::CHUNK_BLOCKS))]
    fn state_chunks(&self, py: Python<'_>, chunk_blocks: usize) -> DumpChunks {
        let snapshot = self.recorder.with(py, true, |recorder| recorder.snapshot());
        DumpChunks::new(py.detach(|| snapshot.into_chunks(chunk_blocks)))
    }

    #[pyo3(signature = (partial, chunk_blocks=publisher::CHUNK_BLOCKS))]
    fn dump(&self, py: Python<'_>, partial: bool, chunk_blocks: usize) -> DumpChunks {
        let (rank, snapshot) = self.recorder.with(py, true, |recorder| {
            let head = recorder.head();
            ((head.worker_id, head.dp_rank), recorder.snapshot())
        });
        DumpChunks::new(py.detach(|| snapshot.into_dump(rank, partial, chunk_blocks)))
    }

    fn notes<'py>(&self, py: Python<'py>) -> PyResult<Vec<Note<'py>>> {
        let notes = self.recorder.with(py, true, |recorder| recorder.notes());
        notes
            .into_iter()
            .map(|(scope, parts, hashes)| {
                let hashes = pack(py, hashes.into_iter().map(u64::to_le_bytes))?;
                Ok((scope_object(py, scope)?, parts, hashes.into_any()))
            })
            .collect()
    }

    fn load(&self, py: Python<'_>, chunks: &Bound<'_, PyAny>) -> PyResult<()> {
        let objects: Vec<Bound<'_, PyAny>> = chunks.try_iter()?.collect::<PyResult<_>>()?;
        let chunks: Vec<Cow<'_, [u8]>> = objects.iter().map(immutable).collect::<PyResult<_>>()?;
        let loaded: Result<(), Malformed> = self.recorder.with(py, true, |recorder| {
            let total = chunks.iter().map(|chunk| RankState::count_blocks(chunk)).sum();
            for chunk in &chunks {
                recorder.load(&RankState::parse(chunk)?, total);
            }
            Ok(())
        });
        loaded.map_err(|error| PyValueError::new_err(error.0))
    }

    fn annotate(&self, py: Python<'_>, notes: Vec<Note<'_>>) -> PyResult<()> {
        let notes =
            notes.iter().map(|(scope, parts, hashes)| Ok((scope_in(scope)?, *parts, words(hashes)?.into_owned())));
        let notes = notes.collect::<PyResult<_>>()?;
        self.recorder.with(py, true, |recorder| recorder.annotate(notes));
        Ok(())
    }
}

/// The fields of `RecorderCounts`.
type Counts = (u64, u64, usize, u64, u64, u64, usize, usize, u64);

fn counts_of(recorder: &publisher::EventRecorder) -> Counts {
    let (state, log) = (recorder.state(), recorder.log());
    (
        state.next_event_id,
        state.digest(),
        state.len(),
        state.device_copies(),
        state.unknown_removals,
        state.unplaced_blocks,
        log.unsent(),
        log.unsent_bytes,
        log.dropped,
    )
}

fn unix_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Returns the error of `kvrouter.core.interface` for a refusal.
fn raised(py: Python<'_>, error: Error) -> PyErr {
    let created = match &error {
        Error::UnknownParent(parent) => interface(py, "UnknownParent").and_then(|class| class.call1((*parent,))),
        Error::Invalid(message) => interface(py, "InvalidEvent").and_then(|class| class.call1((message,))),
        Error::Gone(message) => interface(py, "EventsGone").and_then(|class| class.call1((message,))),
    };
    created.map_or_else(|failure| failure, PyErr::from_value)
}

fn scope_object(py: Python<'_>, scope: Option<Arc<Scope>>) -> PyResult<Bound<'_, PyAny>> {
    let class = interface(py, "Scope")?;
    match scope.as_deref() {
        None => class.call0(),
        Some(scope) => class.call1((&scope.lora_name, &scope.cache_salt, &scope.tenant)),
    }
}

/// Returns a `Scope` of Python; None for the base scope.
fn scope_in(scope: &Bound<'_, PyAny>) -> PyResult<Option<Arc<Scope>>> {
    let text = |name: &str| -> PyResult<String> { scope.getattr(name)?.extract() };
    let scope = Scope { lora_name: text("lora_name")?, cache_salt: text("cache_salt")?, tenant: text("tenant")? };
    Ok((scope != Scope::default()).then(|| Arc::new(scope)))
}
