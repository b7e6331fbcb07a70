//! Python class for the blocks and events of a publisher's rank.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::words;
use super::dump::DumpChunks;
use super::exclusive::Exclusive;
use crate::publisher::{Block, Error, NumberedEvent, RankState as State, Scope};
use crate::wire::{BlockRecord, Malformed};

/// Number of blocks from which a call releases the GIL: it takes about 20 µs.
const LONG: usize = 128;

/// Adapter, salt and tenant.
type ScopeParts = (String, String, String);
/// Id, encoded KvEvent, and digest after it.
pub type Event<'py> = (u64, Bound<'py, PyBytes>, u64);
/// Parent, its place, local hash, sequence hash, depth, copies, scope and parts.
type BlockParts = (Option<u64>, u64, u64, u64, u32, (u32, u32, u32, u32), ScopeParts, u32);

/// Implements `kvrouter.publisher.events.rank_state.RankState` for plain integers and bytes.
///
/// Raises KeyError with the hash of a parent that is not resident, and ValueError for other inconsistent reports.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct RankState {
    state: Exclusive<State>,
}

#[pymethods]
impl RankState {
    #[new]
    fn new(incarnation: u64, counted: bool) -> Self {
        Self { state: Exclusive::new(State::new(incarnation, counted)) }
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.state.with(py, false, |state| state.len())
    }

    #[getter]
    fn digest(&self, py: Python<'_>) -> u64 {
        self.state.with(py, false, |state| state.digest())
    }

    /// Returns next event id, unknown removals and unplaced blocks.
    fn counts(&self, py: Python<'_>) -> (u64, u64, u64) {
        self.state.with(py, false, |state| (state.next_event_id, state.unknown_removals, state.unplaced_blocks))
    }

    fn is_resident(&self, py: Python<'_>, engine_hash: u64, tier: i32) -> PyResult<bool> {
        self.state.with(py, false, |state| state.is_resident(engine_hash, tier)).map_err(raised)
    }

    fn copies_in(&self, py: Python<'_>, tier: i32) -> PyResult<u64> {
        self.state.with(py, false, |state| state.copies_in(tier)).map_err(raised)
    }

    /// Returns a resident block; None if there is none.
    fn block(&self, py: Python<'_>, engine_hash: u64) -> Option<BlockParts> {
        self.state.with(py, false, |state| state.get(engine_hash).map(parts_of))
    }

    fn blocks(&self, py: Python<'_>) -> Vec<(u64, BlockParts)> {
        self.state.with(py, true, |state| state.blocks().map(|(hash, block)| (hash, parts_of(block))).collect())
    }

    fn chunk(&self, py: Python<'_>, engine_hash: u64, blocks: usize) -> Vec<u64> {
        self.state.with(py, false, |state| state.chunk(engine_hash, blocks))
    }

    #[allow(clippy::too_many_arguments)] // one report of an engine, as it comes
    fn stored<'py>(
        &self,
        py: Python<'py>,
        engine_hashes: Vec<u64>,
        local_hashes: &Bound<'py, PyAny>,
        parent: Option<u64>,
        tier: i32,
        scope: ScopeParts,
        new_copies: bool,
        parts: u32,
    ) -> PyResult<Vec<Event<'py>>> {
        let locals = words(local_hashes)?;
        let (scope, long) = (scope_of(scope), locals.len() > LONG);
        let events = self
            .state
            .with(py, long, |state| state.stored(&engine_hashes, &locals, parent, tier, scope, new_copies, parts));
        Ok(encoded(py, events.map_err(raised)?))
    }

    fn stored_known<'py>(&self, py: Python<'py>, engine_hashes: Vec<u64>, tier: i32) -> PyResult<Vec<Event<'py>>> {
        let long = engine_hashes.len() > LONG;
        let events = self.state.with(py, long, |state| state.stored_known(&engine_hashes, tier));
        Ok(encoded(py, events.map_err(raised)?))
    }

    fn removed<'py>(&self, py: Python<'py>, engine_hashes: Vec<u64>, tier: i32) -> PyResult<Vec<Event<'py>>> {
        let long = engine_hashes.len() > LONG;
        let events = self.state.with(py, long, |state| state.removed(&engine_hashes, tier));
        Ok(encoded(py, events.map_err(raised)?))
    }

    fn cleared<'py>(&self, py: Python<'py>, tier: i32) -> PyResult<Vec<Event<'py>>> {
        let event = self.state.with(py, true, |state| state.cleared(tier)).map_err(raised)?;
        Ok(encoded(py, vec![event]))
    }

    /// Fills an empty state from encoded BlockRecords, in which parents precede children.
    fn load(&self, py: Python<'_>, next_event_id: u64, records: Vec<Vec<u8>>) -> PyResult<()> {
        let parsed: Result<Vec<_>, Malformed> = records.iter().map(|record| BlockRecord::parse(record)).collect();
        let parsed = parsed.map_err(|error| PyValueError::new_err(error.0))?;
        self.state.with(py, true, |state| state.load(next_event_id, &parsed));
        Ok(())
    }

    /// Sets scope and parts of resident blocks; others are ignored.
    fn annotate(&self, py: Python<'_>, engine_hashes: Vec<u64>, scope: ScopeParts, parts: u32) {
        let scope = scope_of(scope);
        self.state.with(py, true, |state| {
            for engine_hash in engine_hashes {
                state.annotate(engine_hash, scope.clone(), parts);
            }
        });
    }

    fn begin(&self, py: Python<'_>) {
        self.state.with(py, false, State::begin);
    }

    fn commit(&self, py: Python<'_>) {
        self.state.with(py, false, State::commit);
    }

    fn roll_back(&self, py: Python<'_>) {
        self.state.with(py, true, State::roll_back);
    }

    /// Returns encoded GetRankStateResponses with the state as of now. Each is encoded when it is read.
    fn chunks(&self, py: Python<'_>, counting: i32, chunk_blocks: usize) -> DumpChunks {
        let snapshot = self.state.with(py, true, |state| state.snapshot());
        DumpChunks::lazy(py.detach(|| snapshot.into_chunks(counting, chunk_blocks)))
    }
}

fn raised(error: Error) -> PyErr {
    match error {
        Error::UnknownParent(parent) => PyKeyError::new_err(parent),
        error => PyValueError::new_err(error.to_string()),
    }
}

pub fn encoded(py: Python<'_>, events: Vec<NumberedEvent>) -> Vec<Event<'_>> {
    events.into_iter().map(|event| (event.id, PyBytes::new(py, &event.encoded), event.digest)).collect()
}

fn scope_of((lora_name, cache_salt, tenant): ScopeParts) -> Option<Arc<Scope>> {
    let scope = Scope { lora_name, cache_salt, tenant };
    (scope != Scope::default()).then(|| Arc::new(scope))
}

fn parts_of(block: &Block) -> BlockParts {
    let scope = block.scope.as_deref().cloned().unwrap_or_default();
    (
        block.parent,
        block.parent_place,
        block.local,
        block.sequence,
        block.depth,
        block.copies.into(),
        (scope.lora_name, scope.cache_salt, scope.tenant),
        block.parts,
    )
}
