//! Active sequences, as Python calls them.

use std::sync::Arc;

use pyo3::exceptions::{PyKeyError, PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};

use super::buffers;
use super::exclusive::Exclusive;
use crate::ranks::Name;
use crate::sequences::{Blocks, Booked, Key, Request, Sequences};

/// Blocks that take some 20 µs to book, to free or to look up, from where giving up the GIL pays.
const LONG: usize = 512;

/// An object that can be handed on without the GIL.
type Shared<T> = Arc<Py<T>>;

struct State {
    sequences: Sequences<Shared<PyAny>>,
    /// The ranks as `loads` gives them, until one comes or goes.
    ranks: Option<Shared<PyList>>,
    /// How often that happened.
    changes: u64,
}

impl State {
    fn ranks_changed(&mut self) -> Option<Shared<PyList>> {
        self.changes += 1;
        self.ranks.take()
    }
}

/// Load that requests in flight put on ranks; see `kvrouter.core.interface.ActiveSequences`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct ActiveSequences {
    state: Exclusive<State>,
}

/// Packed hashes as words.
pub fn words(packed: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let packed = buffers::packed_hashes(packed)?;
    let words = packed.as_slice().chunks_exact(8);
    Ok(words.map(|word| word.first_chunk().map_or(0, |word| u64::from_le_bytes(*word))).collect())
}

/// A bound: 0 or more, and what does not fit into memory is none.
fn bound(value: i128) -> PyResult<usize> {
    if value < 0 {
        return Err(PyValueError::new_err("bounds are 0 or more"));
    }
    Ok(usize::try_from(value).unwrap_or(usize::MAX))
}

/// A number of tokens; None for a negative one.
fn tokens(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match value.extract() {
        Ok(tokens) => Ok(Some(tokens)),
        Err(_) if value.lt(0).unwrap_or(false) => Ok(None),
        Err(error) => Err(error),
    }
}

fn load_columns(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "kvrouter.core.interface", "LoadColumns")
}

/// Sums as Python integers: nearly always narrow ones, which are made faster.
fn sums<'py>(py: Python<'py>, column: &[u128]) -> PyResult<Bound<'py, PyList>> {
    if column.iter().all(|sum| *sum <= u128::from(u64::MAX)) {
        PyList::new(py, column.iter().map(|sum| *sum as u64))
    } else {
        PyList::new(py, column)
    }
}

impl ActiveSequences {
    /// The list of ranks, kept for the next call unless they have changed meanwhile.
    fn made_ranks(&self, py: Python<'_>, changes: u64, names: Vec<Name>) -> PyResult<Shared<PyList>> {
        let made = Arc::new(PyList::new(py, names)?.unbind());
        let kept = Arc::clone(&made);
        self.state.with(py, false, |state| {
            if state.changes == changes {
                state.ranks = Some(kept);
            }
        });
        Ok(made)
    }
}

#[pymethods]
impl ActiveSequences {
    #[new]
    #[pyo3(signature = (block_size, max_bookings=1 << 20, tombstones=1 << 16))]
    fn new(block_size: i128, max_bookings: i128, tombstones: i128) -> PyResult<Self> {
        let Some(size) = u64::try_from(block_size).ok().filter(|size| *size > 0) else {
            return Err(PyValueError::new_err(format!("the block size is {block_size}, must be 1 to 2^64 - 1")));
        };
        let sequences = Sequences::new(size, bound(max_bookings)?, bound(tombstones)?);
        Ok(Self { state: Exclusive::new(State { sequences, ranks: None, changes: 0 }) })
    }

    fn add_rank(&self, py: Python<'_>, rank: Name) {
        let stale = self.state.with(py, false, |state| state.sequences.add_rank(rank).then(|| state.ranks_changed()));
        drop(stale); // here, where the GIL is held
    }

    fn remove_rank(&self, py: Python<'_>, rank: Name) -> Vec<Key> {
        let long = self.state.with(py, false, |state| state.sequences.blocks_of_rank(rank)) > LONG;
        let gone = self.state.with(py, long, |state| {
            let gone = state.sequences.remove_rank(rank)?;
            Some((gone, state.ranks_changed()))
        });
        let Some((gone, _stale)) = gone else { return Vec::new() };
        gone.into_iter().map(|(key, _)| Arc::unwrap_or_clone(key)).collect()
    }

    fn book(&self, py: Python<'_>, booking: &Bound<'_, PyAny>) -> PyResult<bool> {
        let part = |name| booking.getattr(name);
        let packed = part(pyo3::intern!(py, "sequence_hashes"))?;
        let hashes = words(&packed)?;
        let prompt_tokens = tokens(&part(pyo3::intern!(py, "prompt_tokens"))?)?;
        let prefill_tokens = tokens(&part(pyo3::intern!(py, "prefill_tokens"))?)?;
        let (Some(prompt_tokens), Some(prefill_tokens)) = (prompt_tokens, prefill_tokens) else {
            return Err(PyValueError::new_err("numbers of tokens are 0 or more"));
        };
        let key: Key = part(pyo3::intern!(py, "key"))?.extract()?;
        let rank = part(pyo3::intern!(py, "rank"))?;
        let blocks = if !part(pyo3::intern!(py, "track_blocks"))?.is_truthy()? {
            Blocks::Untracked
        } else if part(pyo3::intern!(py, "unique_blocks"))?.is_truthy()? {
            Blocks::Unique
        } else {
            Blocks::Shared(&hashes)
        };
        let request = Request { key, rank: rank.extract().ok(), prompt_tokens, prefill_tokens, blocks };
        let payload = Arc::new(booking.clone().unbind());
        let given = Arc::clone(&payload); // so that the last reference goes where the GIL is held
        match self.state.with(py, hashes.len() > LONG, |state| state.sequences.book(request, given)) {
            Booked::Yes => Ok(true),
            Booked::Known => Ok(false),
            Booked::UnknownRank => Err(PyKeyError::new_err(rank.unbind())),
            Booked::Full => {
                let most = self.state.with(py, false, |state| state.sequences.max_bookings());
                Err(PyOverflowError::new_err(format!("there are {most} bookings already")))
            }
            Booked::NoMemory => Err(PyMemoryError::new_err("no memory for the booking's blocks")),
        }
    }

    fn booking(&self, py: Python<'_>, key: Key) -> Option<Py<PyAny>> {
        let booking = self.state.with(py, false, |state| state.sequences.payload(&key).cloned());
        booking.map(|booking| booking.clone_ref(py))
    }

    fn prefill_complete(&self, py: Python<'_>, key: Key) -> bool {
        self.state.with(py, false, |state| state.sequences.prefill_complete(&key))
    }

    #[pyo3(signature = (key, tokens))]
    fn output_tokens(&self, py: Python<'_>, key: Key, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tokens = self::tokens(tokens)?.unwrap_or(0);
        Ok(self.state.with(py, false, |state| state.sequences.output_tokens(&key, tokens)))
    }

    fn free(&self, py: Python<'_>, key: Key) -> bool {
        let long = self.state.with(py, false, |state| state.sequences.blocks_of(&key)) > LONG;
        self.state.with(py, long, |state| state.sequences.free(Arc::new(key))).is_some()
    }

    #[pyo3(signature = (sequence_hashes=None, prompt_tokens=None))]
    fn loads<'py>(
        &self,
        py: Python<'py>,
        sequence_hashes: Option<&Bound<'py, PyAny>>,
        prompt_tokens: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let hashes = sequence_hashes.map_or_else(|| Ok(Vec::new()), words)?;
        let prompt_tokens = prompt_tokens.map_or(Ok(Some(0)), tokens)?;
        let Some(prompt_tokens) = prompt_tokens else {
            return Err(PyValueError::new_err("numbers of tokens are 0 or more"));
        };
        let (columns, ranks) = self.state.with(py, hashes.len() > LONG, |state| {
            let sequences = &state.sequences;
            let tail = u64::from(!prompt_tokens.is_multiple_of(sequences.block_size()));
            let names = || (state.changes, sequences.ranks().collect());
            (sequences.loads(&hashes, tail), state.ranks.clone().ok_or_else(names))
        });
        let ranks = match ranks {
            Ok(ranks) => ranks,
            Err((changes, names)) => self.made_ranks(py, changes, names)?,
        };
        let ranks = ranks.bind(py);
        let ranks = ranks.get_slice(0, ranks.len());
        load_columns(py)?.call1((
            ranks,
            sums(py, &columns.active_blocks)?,
            sums(py, &columns.prefill_tokens)?,
            PyList::new(py, &columns.requests)?,
            PyList::new(py, &columns.leading_active_blocks)?,
        ))
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.state.with(py, false, |state| state.sequences.len())
    }
}
