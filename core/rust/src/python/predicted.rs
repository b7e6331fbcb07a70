//! Python class for the index of predicted blocks.

use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::buffers::words;
use super::exclusive::Exclusive;
use crate::index::tree::ranks::Name;
use crate::predicted::Predicted;
use crate::storage::memory::trim_heap;

/// Number of blocks from which a call releases the GIL: it takes about 20 µs.
const LONG: usize = 512;

/// Implements `kvrouter.core.interface.PredictedIndex`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct PredictedIndex {
    index: Exclusive<Predicted>,
}

impl PredictedIndex {
    fn drop_of(&self, py: Python<'_>, rank: Name, drop: impl FnOnce(&mut Predicted) -> usize + Send) -> usize {
        let known = self.index.with(py, false, |index| index.entries_of(rank)) > 0;
        let dropped = if known { self.index.with(py, true, drop) } else { 0 };
        self.trim_if_due(py);
        dropped
    }

    fn trim_if_due(&self, py: Python<'_>) {
        if self.index.with(py, false, |index| index.should_trim()) {
            py.detach(trim_heap);
        }
    }
}

#[pymethods]
impl PredictedIndex {
    #[new]
    #[pyo3(signature = (ttl_seconds=120.0, max_blocks=1 << 20, prune_ratio=0.8))]
    fn new(ttl_seconds: f64, max_blocks: i128, prune_ratio: f64) -> PyResult<Self> {
        if ttl_seconds.is_nan() || ttl_seconds <= 0.0 {
            return Err(PyValueError::new_err(format!(
                "expected a time to live above 0 seconds, received {ttl_seconds}"
            )));
        }
        if max_blocks < 1 {
            return Err(PyValueError::new_err(format!("expected a bound of 1 or more blocks, received {max_blocks}")));
        }
        if !(0.0..=1.0).contains(&prune_ratio) {
            return Err(PyValueError::new_err(format!("expected a prune ratio from 0 to 1, received {prune_ratio}")));
        }
        let max_blocks = usize::try_from(max_blocks).unwrap_or(usize::MAX);
        Ok(Self { index: Exclusive::new(Predicted::new(ttl_seconds, max_blocks, prune_ratio)) })
    }

    fn record(&self, py: Python<'_>, rank: Name, sequence_hashes: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        let hashes = words(sequence_hashes)?;
        let long = self.index.with(py, false, |index| index.work(hashes.len(), now, LONG)) >= LONG;
        let recorded = self.index.with(py, long, |index| index.record(rank, &hashes, now));
        self.trim_if_due(py);
        recorded.map_err(|_| PyMemoryError::new_err("not enough memory for the blocks of the request"))
    }

    fn overlaps<'py>(
        &self,
        py: Python<'py>,
        sequence_hashes: &Bound<'py, PyAny>,
        now: f64,
    ) -> PyResult<Bound<'py, PyDict>> {
        let hashes = words(sequence_hashes)?;
        let overlaps = PyDict::new(py);
        for (rank, overlap) in self.index.with(py, false, |index| index.overlaps(&hashes, now)) {
            overlaps.set_item(rank, overlap)?;
        }
        Ok(overlaps)
    }

    fn last_use(
        &self,
        py: Python<'_>,
        rank: Name,
        sequence_hashes: &Bound<'_, PyAny>,
        now: f64,
    ) -> PyResult<Option<f64>> {
        let hashes = words(sequence_hashes)?;
        Ok(self.index.with(py, false, |index| index.last_use(rank, &hashes, now)))
    }

    fn forget_until(&self, py: Python<'_>, rank: Name, at: f64) -> usize {
        self.drop_of(py, rank, |index| index.forget_until(rank, at))
    }

    fn keep_newest(&self, py: Python<'_>, rank: Name, blocks: usize) -> usize {
        if self.blocks_of(py, rank) <= blocks {
            0
        } else {
            self.drop_of(py, rank, |index| index.keep_newest(rank, blocks))
        }
    }

    fn blocks_of(&self, py: Python<'_>, rank: Name) -> usize {
        self.index.with(py, false, |index| index.entries_of(rank))
    }

    fn remove_rank(&self, py: Python<'_>, rank: Name) -> usize {
        self.drop_of(py, rank, |index| index.remove_rank(rank))
    }

    fn expire(&self, py: Python<'_>, now: f64) -> usize {
        let long = self.index.with(py, false, |index| index.work(0, now, LONG)) >= LONG;
        let dropped = self.index.with(py, long, |index| index.expire(now));
        self.trim_if_due(py);
        dropped
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.index.with(py, false, |index| index.len())
    }
}
