//! Python class for the prefix index.

use std::borrow::Cow;
use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::dump::DumpChunks;
use super::event_batch::{EventBatch, parse};
use super::shared::Shared;
use super::{buffers, interface};
use crate::index::Index;
use crate::index::apply::Summary;
use crate::index::budget;
use crate::index::dump::Dump;
use crate::index::tree::ranks::Name;
use crate::wire::{Batch, Malformed};

/// Implements `kvrouter.core.interface.MemoryBudget`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct MemoryBudget(Arc<budget::MemoryBudget>);

#[pymethods]
impl MemoryBudget {
    #[new]
    #[pyo3(signature = (max_bytes=0))]
    fn new(max_bytes: i128) -> PyResult<Self> {
        Ok(Self(Arc::new(budget::MemoryBudget::new(bound(max_bytes)?))))
    }
    #[getter]
    fn max_bytes(&self) -> u64 {
        self.0.max_bytes()
    }
    #[getter]
    fn used_bytes(&self) -> u64 {
        self.0.used_bytes()
    }
}

fn bound(value: i128) -> PyResult<u64> {
    u64::try_from(value).map_err(|_| PyValueError::new_err("expected a bound of 0 (none) or more, below 2^64"))
}

/// Implements `kvrouter.core.interface.PrefixIndex`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct PrefixIndex {
    index: Shared<Index>,
}

/// Estimated durations of calls, in ns, measured with `bench/core`. They decide whether a call releases the GIL.
mod work {
    use super::{Batch, Index, Name};

    pub fn batch(index: &Index, batch: &Batch<'_>, bytes: usize) -> usize {
        let name = (batch.worker_id, batch.dp_rank);
        let mut work = 2 * bytes;
        if batch.clears() || index.cursor(name).is_some_and(|(incarnation, _)| incarnation < batch.incarnation) {
            work += departure(index, name);
        }
        // Events change the digest.
        let knows_digest = batch.events.is_empty() && index.knows_digest(name);
        if index.checks_digest(batch) && !knows_digest {
            work += digest(index, name);
        }
        work
    }

    pub fn query(index: &Index, prompt_blocks: usize) -> usize {
        prompt_blocks + 4 * index.ranks.slots()
    }

    pub fn answer(index: &Index, prompt_blocks: usize) -> usize {
        query(index, prompt_blocks) + 25 * index.ranks.slots()
    }

    pub fn digest(index: &Index, rank: Name) -> usize {
        15 * index.entries_of(rank) as usize
    }

    pub fn departure(index: &Index, rank: Name) -> usize {
        20 * index.entries_of(rank) as usize
    }

    pub fn dump(index: &Index, rank: Name) -> usize {
        100 * index.entries_of(rank) as usize
    }

    pub fn load(bytes: usize) -> usize {
        5 * bytes
    }

    pub fn statistics(index: &Index) -> usize {
        10 * index.nodes.len() + 50 * index.ranks.slots()
    }

    pub fn little(_: &Index) -> usize {
        0
    }
}

fn tier_index(tier: i64) -> PyResult<u32> {
    match tier {
        1..=4 => Ok(tier as u32 - 1),
        _ => Err(PyValueError::new_err(format!("expected a tier from 1 to 4, received {tier}"))),
    }
}

#[pymethods]
impl PrefixIndex {
    #[new]
    #[pyo3(signature = (max_blocks=0, budget=None, check_digests=false))]
    fn new(max_blocks: i128, budget: Option<&Bound<'_, MemoryBudget>>, check_digests: bool) -> PyResult<Self> {
        let budget =
            budget.map_or_else(|| Arc::new(budget::MemoryBudget::new(0)), |budget| Arc::clone(&budget.get().0));
        Ok(Self { index: Shared::new(Index::with_budget(bound(max_blocks)?, budget, check_digests)) })
    }

    fn apply(&self, py: Python<'_>, batch: &Bound<'_, PyAny>) -> PyResult<ApplySummary> {
        if let Ok(read) = batch.cast::<EventBatch>() {
            return Ok(self.apply_batch(py, read.get().batch(), read.get().bytes(py)));
        }
        let data = batch.cast::<PyBytes>()?.as_bytes();
        Ok(match parse(py, data) {
            Ok(batch) => self.apply_batch(py, &batch, data.len()),
            Err(Malformed(why)) => ApplySummary(Summary { unparsable: why, ..Summary::default() }),
        })
    }

    fn apply_ns(&self, py: Python<'_>, batch: &Bound<'_, EventBatch>) -> Option<usize> {
        let read = batch.get();
        self.index.estimate_if_free(|index| work::batch(index, read.batch(), read.bytes(py)))
    }

    fn find_matches<'py>(&self, py: Python<'py>, local_hashes: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
        let locals = buffers::words(local_hashes)?;
        let response =
            self.index.read(py, |index| work::answer(index, locals.len()), |index| index.find_matches(&locals));
        Ok(PyBytes::new(py, &response))
    }

    fn try_find_matches<'py>(
        &self,
        py: Python<'py>,
        local_hashes: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let locals = buffers::words(local_hashes)?;
        let response =
            self.index.try_read(py, |index| work::answer(index, locals.len()), |index| index.find_matches(&locals));
        Ok(response.map(|response| PyBytes::new(py, &response)))
    }

    #[pyo3(signature = (local_hashes, tier=1))]
    fn overlaps<'py>(
        &self,
        py: Python<'py>,
        local_hashes: &Bound<'py, PyAny>,
        tier: i64,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tier = tier_index(tier)?;
        let locals = buffers::words(local_hashes)?;
        let overlaps =
            self.index.read(py, |index| work::query(index, locals.len()), |index| index.overlaps(&locals, tier));
        buffers::pack(py, overlaps.into_iter().map(u32::to_le_bytes))
    }

    fn pooled(&self, py: Python<'_>, local_hashes: &Bound<'_, PyAny>) -> PyResult<u32> {
        let locals = buffers::words(local_hashes)?;
        Ok(self.index.read(py, |index| work::query(index, locals.len()), |index| index.pooled(&locals)))
    }

    fn slots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let names = self.index.read(py, work::little, Index::names_by_slot);
        PyList::new(py, names)
    }

    fn cursor(&self, py: Python<'_>, rank: Name) -> Option<(u64, u64)> {
        self.index.read(py, work::little, |index| index.cursor(rank))
    }

    fn digest(&self, py: Python<'_>, rank: Name) -> Option<u64> {
        self.index.read_long(py, |index| work::digest(index, rank), |index| index.digest_of(rank))
    }

    fn is_evicted(&self, py: Python<'_>, rank: Name) -> bool {
        self.index.read(py, work::little, |index| index.is_evicted(rank))
    }

    #[pyo3(signature = (rank, incarnation, next_event_id, *, partial=true))]
    fn reset_rank(&self, py: Python<'_>, rank: Name, incarnation: u64, next_event_id: u64, partial: bool) -> u64 {
        let reset = |index: &mut Index| index.reset_rank(rank, incarnation, next_event_id, partial);
        self.index.write(py, |index| work::departure(index, rank), reset)
    }

    fn remove_rank(&self, py: Python<'_>, rank: Name) -> u64 {
        self.index.write(py, |index| work::departure(index, rank), |index| index.remove_rank(rank))
    }

    #[pyo3(signature = (rank, chunk_blocks=4096))]
    fn dump_rank(&self, py: Python<'_>, rank: Name, chunk_blocks: i64) -> PyResult<DumpChunks> {
        let Some(chunk_blocks) = usize::try_from(chunk_blocks).ok().filter(|blocks| *blocks > 0) else {
            return Err(PyValueError::new_err(format!("expected chunks of 1 or more blocks, received {chunk_blocks}")));
        };
        let dump = |index: &Index| index.dump(rank, chunk_blocks);
        Ok(DumpChunks::new(self.index.read_long(py, |index| work::dump(index, rank), dump).into_iter()))
    }

    fn load_rank(&self, py: Python<'_>, chunks: &Bound<'_, PyAny>) -> PyResult<u64> {
        let objects: Vec<Bound<'_, PyAny>> = chunks.try_iter()?.collect::<PyResult<_>>()?;
        let chunks: Vec<Cow<'_, [u8]>> = objects.iter().map(buffers::immutable).collect::<PyResult<_>>()?;
        let bytes: usize = chunks.iter().map(|chunk| chunk.len()).sum();
        // The dump is validated without the lock, because that takes longer than storing its blocks.
        let loaded = py
            .detach(|| Dump::parse(&chunks))
            .and_then(|dump| self.index.write(py, |_| work::load(bytes), |index| index.replace(&dump)));
        match loaded {
            Ok(entries) => Ok(entries),
            Err(why) => Err(PyErr::from_value(interface(py, "InvalidDump")?.call1((why,))?)),
        }
    }

    fn ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let infos = self.index.read_long(py, work::statistics, Index::rank_infos);
        let class = interface(py, "RankInfo")?;
        let infos: Vec<_> = infos
            .into_iter()
            .map(|info| {
                let (worker_id, dp_rank) = info.name;
                let (incarnation, next_event_id) = info.cursor;
                class.call1((
                    worker_id,
                    dp_rank,
                    incarnation,
                    next_event_id,
                    info.blocks,
                    info.bytes,
                    info.partial,
                    info.evicted,
                ))
            })
            .collect::<PyResult<_>>()?;
        PyList::new(py, infos)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = self.index.read_long(py, work::statistics, Index::stats);
        interface(py, "IndexStats")?.call1((stats.ranks, stats.blocks, stats.distinct_blocks, stats.memory_bytes))
    }

    /// Returns the maximum number of table entries that one operation has moved since the index was created.
    fn most_moved(&self, py: Python<'_>) -> usize {
        self.index.read(py, work::little, Index::most_moved)
    }
}

impl PrefixIndex {
    /// Applies the events of a batch, then compares its digest while queries run.
    fn apply_batch(&self, py: Python<'_>, batch: &Batch<'_>, bytes: usize) -> ApplySummary {
        let work = |index: &Index| work::batch(index, batch, bytes);
        let apply = |index: &mut Index| index.apply_events(batch);
        let compare = |index: &Index, summary| index.compare_digest(batch, summary);
        ApplySummary(if batch.digest.is_some() {
            self.index.write_then_read(py, work, apply, compare)
        } else {
            self.index.write(py, work, apply)
        })
    }
}

/// Implements `kvrouter.core.interface.ApplySummary`. It creates the Python value of a field when the field is read.
#[pyclass(frozen, module = "kvrouter.core._native", name = "ApplySummary")]
pub struct ApplySummary(Summary);

#[pymethods]
impl ApplySummary {
    #[getter]
    fn worker_id(&self) -> u64 {
        self.0.rank.0
    }
    #[getter]
    fn dp_rank(&self) -> u32 {
        self.0.rank.1
    }
    #[getter]
    fn applied(&self) -> u64 {
        self.0.applied
    }
    #[getter]
    fn stored_blocks(&self) -> u64 {
        self.0.stored_blocks
    }
    #[getter]
    fn removed_blocks(&self) -> u64 {
        self.0.removed_blocks
    }
    #[getter]
    fn duplicates(&self) -> u64 {
        self.0.duplicates
    }
    #[getter]
    fn fenced(&self) -> u64 {
        self.0.fenced
    }
    #[getter]
    fn gap(&self) -> Option<(u64, u64)> {
        self.0.gap
    }
    #[getter]
    fn unknown_parents(&self) -> u64 {
        self.0.unknown_parents
    }
    #[getter]
    fn unknown_removals(&self) -> u64 {
        self.0.unknown_removals
    }
    #[getter]
    fn rejected<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.rejected.iter().map(|(id, why)| format!("event {id}: {why}")))
    }
    #[getter]
    fn unparsable(&self) -> &'static str {
        self.0.unparsable
    }
    #[getter]
    fn next_event_id(&self) -> u64 {
        self.0.next_event_id
    }
    #[getter]
    fn incarnation(&self) -> u64 {
        self.0.incarnation
    }
    #[getter]
    fn new_incarnation(&self) -> bool {
        self.0.new_incarnation
    }
    #[getter]
    fn digest_differs(&self) -> bool {
        self.0.digest_differs
    }
    #[getter]
    fn evicted_blocks(&self) -> Option<u64> {
        self.0.evicted_blocks
    }
    #[getter]
    fn evicted_others<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.evicted_others.iter().map(|((worker, rank), blocks)| (*worker, *rank, *blocks)))
    }
    #[getter]
    fn is_plain(&self) -> bool {
        let Summary { rank, applied, stored_blocks, removed_blocks, next_event_id, incarnation, .. } = self.0;
        let plain = Summary { rank, applied, stored_blocks, removed_blocks, ..Summary::default() };
        self.0 == Summary { next_event_id, incarnation, ..plain }
    }
}
