//! Python class for active sequences.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyKeyError, PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use super::buffers;
use super::exclusive::Exclusive;
use crate::index::tree::ranks::Name;
use crate::load::active_sequences::{Blocks, Booked, Request, Sequences};
use crate::load::rank_loads::Key;
use crate::storage::memory::trim_heap;

/// Number of blocks from which a call releases the GIL: it takes about 20 µs.
const LONG: usize = 512;

/// Implements `kvrouter.core.interface.ActiveSequences`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct ActiveSequences {
    sequences: Exclusive<Sequences>,
    ranks: Mutex<Option<Ranks>>,
}

/// `kvrouter.core.interface.LoadColumns`.
type LoadColumns<'py> = (Bound<'py, PyTuple>, Bound<'py, PyBytes>);

/// The ranks as a Python tuple.
struct Ranks {
    names: Arc<[Name]>,
    tuple: Py<PyTuple>,
}

/// Converts a bound of 0 or more. A bound above the address space is no bound.
fn bound(value: i128) -> PyResult<usize> {
    if value < 0 {
        return Err(PyValueError::new_err("expected bounds of 0 or more"));
    }
    Ok(usize::try_from(value).unwrap_or(usize::MAX))
}

/// Converts a number of tokens; None if it is negative.
fn tokens(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match value.extract() {
        Ok(tokens) => Ok(Some(tokens)),
        Err(_) if value.lt(0).unwrap_or(false) => Ok(None),
        Err(error) => Err(error),
    }
}

impl ActiveSequences {
    fn trim_if_due(&self, py: Python<'_>) {
        if self.sequences.with(py, false, |sequences| sequences.should_trim()) {
            py.detach(trim_heap);
        }
    }

    /// Returns the same tuple as before if the ranks have not changed.
    fn ranks<'py>(&self, py: Python<'py>, names: &Arc<[Name]>) -> PyResult<Bound<'py, PyTuple>> {
        let lock = || self.ranks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ranks) = &*lock()
            && Arc::ptr_eq(&ranks.names, names)
        {
            return Ok(ranks.tuple.bind(py).clone());
        }
        // Without the lock, because creating objects may run other Python code, which may call this method again.
        let tuple = PyTuple::new(py, names.iter())?;
        let made = Ranks { names: Arc::clone(names), tuple: tuple.clone().unbind() };
        let before = lock().replace(made);
        drop(before);
        Ok(tuple)
    }
}

#[pymethods]
impl ActiveSequences {
    #[new]
    #[pyo3(signature = (block_size, max_bookings=1 << 20, tombstones=1 << 16))]
    fn new(block_size: i128, max_bookings: i128, tombstones: i128) -> PyResult<Self> {
        let Some(size) = u64::try_from(block_size).ok().filter(|size| *size > 0) else {
            return Err(PyValueError::new_err(format!(
                "expected a block size from 1 to 2^64 - 1, received {block_size}"
            )));
        };
        let sequences = Sequences::new(size, bound(max_bookings)?, bound(tombstones)?);
        Ok(Self { sequences: Exclusive::new(sequences), ranks: Mutex::new(None) })
    }

    fn add_rank(&self, py: Python<'_>, rank: Name) {
        self.sequences.with(py, false, |sequences| sequences.add_rank(rank));
    }

    fn remove_rank(&self, py: Python<'_>, rank: Name) -> Vec<Key> {
        let long = self.sequences.with(py, false, |sequences| sequences.blocks_of_rank(rank)) > LONG;
        let gone = self.sequences.with(py, long, |sequences| sequences.remove_rank(rank));
        self.trim_if_due(py);
        gone.into_iter().map(Arc::unwrap_or_clone).collect()
    }

    #[expect(clippy::too_many_arguments, reason = "most are passed by name")]
    #[pyo3(signature = (key, rank, sequence_hashes, prompt_tokens, prefill_tokens, track_blocks=true, unique_blocks=false, sequences=1, now=0.0))]
    fn book(
        &self,
        py: Python<'_>,
        key: Key,
        rank: &Bound<'_, PyAny>,
        sequence_hashes: &Bound<'_, PyAny>,
        prompt_tokens: &Bound<'_, PyAny>,
        prefill_tokens: &Bound<'_, PyAny>,
        track_blocks: bool,
        unique_blocks: bool,
        sequences: u32,
        now: f64,
    ) -> PyResult<Option<usize>> {
        let hashes = buffers::words(sequence_hashes)?;
        let (Some(prompt_tokens), Some(prefill_tokens)) = (tokens(prompt_tokens)?, tokens(prefill_tokens)?) else {
            return Err(PyValueError::new_err("expected 0 or more tokens"));
        };
        let blocks = match (track_blocks, unique_blocks) {
            (false, _) => Blocks::Untracked,
            (true, true) => Blocks::Unique,
            (true, false) => Blocks::Shared(&hashes),
        };
        let sequences = u64::from(sequences);
        let request = Request { key, rank: rank.extract().ok(), prompt_tokens, prefill_tokens, blocks, sequences, now };
        match self.sequences.with(py, hashes.len() > LONG, |sequences| sequences.book(request)) {
            Booked::Yes(prompts) => Ok(Some(prompts)),
            Booked::Known => Ok(None),
            Booked::UnknownRank => Err(PyKeyError::new_err(rank.clone().unbind())),
            Booked::Full => {
                let most = self.sequences.with(py, false, |sequences| sequences.max_bookings());
                Err(PyOverflowError::new_err(format!("expected at most {most} bookings, received one more")))
            }
            Booked::NoMemory => Err(PyMemoryError::new_err("not enough memory for the blocks of the booking")),
        }
    }

    fn sequences(&self, py: Python<'_>, rank: Name) -> u64 {
        self.sequences.with(py, false, |sequences| sequences.sequences_of_rank(rank))
    }

    fn most_sequences(&self, py: Python<'_>, rank: Name) -> u64 {
        self.sequences.with(py, false, |sequences| sequences.most_sequences(rank))
    }

    #[getter]
    fn seconds_in_flight(&self, py: Python<'_>) -> f64 {
        self.sequences.with(py, false, |sequences| sequences.seconds_in_flight())
    }

    fn rank(&self, py: Python<'_>, key: Key) -> Option<Name> {
        self.sequences.with(py, false, |sequences| sequences.rank(&key))
    }

    #[pyo3(signature = (key, now=0.0))]
    fn prefill_complete(&self, py: Python<'_>, key: Key, now: f64) -> bool {
        self.sequences.with(py, false, |sequences| sequences.prefill_complete(&key, now))
    }

    #[pyo3(signature = (key, tokens))]
    fn output_tokens(&self, py: Python<'_>, key: Key, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tokens = self::tokens(tokens)?.unwrap_or(0);
        Ok(self.sequences.with(py, false, |sequences| sequences.output_tokens(&key, tokens)))
    }

    #[pyo3(signature = (key, now=0.0))]
    fn free(&self, py: Python<'_>, key: Key, now: f64) -> Option<Name> {
        let long = self.sequences.with(py, false, |sequences| sequences.blocks_of(&key)) > LONG;
        let rank = self.sequences.with(py, long, |sequences| sequences.free(Arc::new(key), now));
        self.trim_if_due(py);
        rank
    }

    #[pyo3(signature = (sequence_hashes=None, prompt_tokens=None))]
    fn loads<'py>(
        &self,
        py: Python<'py>,
        sequence_hashes: Option<&Bound<'py, PyAny>>,
        prompt_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<LoadColumns<'py>> {
        let hashes = sequence_hashes.map_or_else(|| Ok(Cow::default()), buffers::words)?;
        let prompt_tokens = prompt_tokens.map_or(Ok(Some(0)), tokens)?;
        let Some(prompt_tokens) = prompt_tokens else {
            return Err(PyValueError::new_err("expected 0 or more tokens"));
        };
        let columns = self.sequences.with(py, hashes.len() > LONG, |sequences| {
            let tail = u64::from(!prompt_tokens.is_multiple_of(sequences.block_size()));
            sequences.loads(&hashes, tail)
        });
        let ranks = self.ranks(py, &columns.ranks)?;
        Ok((ranks, PyBytes::new(py, columns.words.as_flattened())))
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.sequences.with(py, false, |sequences| sequences.len())
    }
}
