//! Active sequences, as Python calls them.

use std::sync::{Arc, Mutex};

use pyo3::exceptions::{PyKeyError, PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyType};

use super::buffers;
use super::exclusive::Exclusive;
use crate::ranks::Name;
use crate::sequences::{Blocks, Booked, Columns, Key, Request, Sequences};

/// Blocks that take some 20 µs to book, to free or to look up, from where giving up the GIL pays.
const LONG: usize = 512;

/// An object that can be handed on without the GIL.
type Shared<T> = Arc<Py<T>>;

/// Load that requests in flight put on ranks; see `kvrouter.core.interface.ActiveSequences`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct ActiveSequences {
    sequences: Exclusive<Sequences<Shared<PyAny>>>,
    lists: Mutex<Option<Lists>>,
}

/// What most ranks give again at the next reading, as Python has it: copying a list is many times as fast as making it.
struct Lists {
    reading: u64,
    ranks: Py<PyList>,
    prefill_tokens: Py<PyList>,
    requests: Py<PyList>,
    zeroes: Py<PyList>,
}

impl Lists {
    fn new(py: Python<'_>, columns: &Columns) -> PyResult<Self> {
        Ok(Self {
            reading: columns.reading,
            ranks: PyList::new(py, columns.ranks.iter())?.unbind(),
            prefill_tokens: sums(py, &columns.prefill_tokens)?.unbind(),
            requests: PyList::new(py, &columns.requests)?.unbind(),
            zeroes: PyList::new(py, columns.ranks.iter().map(|_| 0u32))?.unbind(),
        })
    }

    /// Goes on from the reading before.
    fn update(&mut self, py: Python<'_>, columns: &Columns) -> PyResult<()> {
        let (prefill_tokens, requests) = (self.prefill_tokens.bind(py), self.requests.bind(py));
        for &at in &columns.changed {
            let sum = columns.prefill_tokens.get(at).copied().unwrap_or_default();
            match u64::try_from(sum) {
                Ok(narrow) => prefill_tokens.set_item(at, narrow)?,
                Err(_) => prefill_tokens.set_item(at, sum)?,
            }
            requests.set_item(at, columns.requests.get(at).copied().unwrap_or_default())?;
        }
        self.reading = columns.reading;
        Ok(())
    }

    fn to_load_columns<'py>(&self, py: Python<'py>, columns: &Columns) -> PyResult<Bound<'py, PyAny>> {
        let copy = |list: &Py<PyList>| list.bind(py).get_slice(0, columns.ranks.len());
        let leading = copy(&self.zeroes);
        for (at, blocks) in columns.leading_active_blocks.iter().enumerate().filter(|(_, blocks)| **blocks > 0) {
            leading.set_item(at, blocks)?;
        }
        let active = sums(py, &columns.active_blocks)?;
        let class = load_columns(py)?;
        class.call1((copy(&self.ranks), active, copy(&self.prefill_tokens), copy(&self.requests), leading))
    }
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
    fn columns<'py>(&self, py: Python<'py>, columns: &Columns) -> PyResult<Bound<'py, PyAny>> {
        // Making objects may run other code, which may come here again: it makes lists of its own.
        let Ok(mut kept) = self.lists.try_lock() else {
            return Lists::new(py, columns)?.to_load_columns(py, columns);
        };
        let current = match kept.take() {
            Some(mut lists) if lists.reading + 1 == columns.reading && !columns.ranks_changed => {
                lists.update(py, columns)?;
                lists
            }
            // Another thread's later reading went on from here: that is kept.
            Some(later) if later.reading > columns.reading => {
                *kept = Some(later);
                return Lists::new(py, columns)?.to_load_columns(py, columns);
            }
            _ => Lists::new(py, columns)?,
        };
        kept.insert(current).to_load_columns(py, columns)
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
        Ok(Self { sequences: Exclusive::new(sequences), lists: Mutex::new(None) })
    }

    fn add_rank(&self, py: Python<'_>, rank: Name) {
        self.sequences.with(py, false, |sequences| sequences.add_rank(rank));
    }

    fn remove_rank(&self, py: Python<'_>, rank: Name) -> Vec<Key> {
        let long = self.sequences.with(py, false, |sequences| sequences.blocks_of_rank(rank)) > LONG;
        let gone = self.sequences.with(py, long, |sequences| sequences.remove_rank(rank));
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
        match self.sequences.with(py, hashes.len() > LONG, |sequences| sequences.book(request, given)) {
            Booked::Yes => Ok(true),
            Booked::Known => Ok(false),
            Booked::UnknownRank => Err(PyKeyError::new_err(rank.unbind())),
            Booked::Full => {
                let most = self.sequences.with(py, false, |sequences| sequences.max_bookings());
                Err(PyOverflowError::new_err(format!("there are {most} bookings already")))
            }
            Booked::NoMemory => Err(PyMemoryError::new_err("no memory for the booking's blocks")),
        }
    }

    fn booking(&self, py: Python<'_>, key: Key) -> Option<Py<PyAny>> {
        let booking = self.sequences.with(py, false, |sequences| sequences.payload(&key).cloned());
        booking.map(|booking| booking.clone_ref(py))
    }

    fn prefill_complete(&self, py: Python<'_>, key: Key) -> bool {
        self.sequences.with(py, false, |sequences| sequences.prefill_complete(&key))
    }

    #[pyo3(signature = (key, tokens))]
    fn output_tokens(&self, py: Python<'_>, key: Key, tokens: &Bound<'_, PyAny>) -> PyResult<bool> {
        let tokens = self::tokens(tokens)?.unwrap_or(0);
        Ok(self.sequences.with(py, false, |sequences| sequences.output_tokens(&key, tokens)))
    }

    fn free(&self, py: Python<'_>, key: Key) -> bool {
        let long = self.sequences.with(py, false, |sequences| sequences.blocks_of(&key)) > LONG;
        self.sequences.with(py, long, |sequences| sequences.free(Arc::new(key))).is_some()
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
        let columns = self.sequences.with(py, hashes.len() > LONG, |sequences| {
            let tail = u64::from(!prompt_tokens.is_multiple_of(sequences.block_size()));
            sequences.loads(&hashes, tail)
        });
        self.columns(py, &columns)
    }

    fn __len__(&self, py: Python<'_>) -> usize {
        self.sequences.with(py, false, |sequences| sequences.len())
    }
}
