//! Python class for the recency of cached blocks.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::{LastRow, words};
use super::exclusive::Exclusive;
use crate::index::tree::ranks::Name;
use crate::load::cache_recency::{CachedRank, Recency};

/// Implements `kvrouter.core.interface.CacheRecency`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct CacheRecency {
    recency: Exclusive<Recency>,
    last: Mutex<LastRow>,
}

#[pymethods]
impl CacheRecency {
    #[new]
    #[pyo3(signature = (rank_sample=1024, max_sample=1 << 20, history_sample=1 << 16))]
    fn new(rank_sample: i128, max_sample: i128, history_sample: i128) -> PyResult<Self> {
        if rank_sample.min(max_sample).min(history_sample) < 1 {
            return Err(PyValueError::new_err(format!(
                "expected samples of 1 block or more, received {rank_sample}, {max_sample} and {history_sample}"
            )));
        }
        let bound = |value: i128| u64::try_from(value).unwrap_or(u64::MAX);
        let recency = Recency::new(bound(rank_sample), bound(max_sample), bound(history_sample) as usize);
        Ok(Self { recency: Exclusive::new(recency), last: Mutex::default() })
    }

    fn set_ranks(&self, py: Python<'_>, ranks: Vec<CachedRank>) {
        self.recency.with(py, true, |recency| recency.set_ranks(&ranks));
    }

    fn record(&self, py: Python<'_>, rank: Name, sequence_hashes: &Bound<'_, PyAny>, now: f64) -> PyResult<()> {
        let blocks = words(sequence_hashes)?;
        self.recency.with(py, false, |recency| recency.record(rank, &blocks, now));
        Ok(())
    }

    fn reuse_chance<'py>(&self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyBytes>> {
        let chances = self.recency.with(py, false, |recency| recency.reuse_chance(now).to_vec());
        // No thread waits for the GIL while it holds the mutex.
        self.last.lock().unwrap_or_else(PoisonError::into_inner).packed(py, &chances)
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.recency.with(py, false, |recency| recency.len())
    }
}
