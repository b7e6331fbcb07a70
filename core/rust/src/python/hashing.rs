//! Python functions for hashing.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers;
use crate::hash;

/// Size of tokens from which hashing releases the GIL, in bytes: it takes about 20 µs.
const LONG_PROMPT: usize = 128 << 10;
/// Number of blocks from which chaining releases the GIL: it takes about 20 µs.
const LONG_CHAIN: usize = 4 << 10;

/// Returns the packed local hashes of the full blocks of a prompt.
#[pyfunction]
#[pyo3(signature = (token_ids, block_size, scope=None, multimodal=None))]
pub fn local_hashes<'py>(
    py: Python<'py>,
    token_ids: &Bound<'py, PyAny>,
    block_size: i64,
    scope: Option<&Bound<'py, PyAny>>,
    multimodal: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyBytes>> {
    let tokens = buffers::tokens(token_ids)?;
    let Some(block_size) = usize::try_from(block_size).ok().filter(|size| *size > 0) else {
        return Err(PyValueError::new_err("expected a block size of 1 or more"));
    };
    let (seed, content) = (buffers::seed(scope)?, buffers::multimodal(multimodal)?);
    let hashes = tokens.with(py, tokens.as_slice().len() > LONG_PROMPT, |tokens| {
        let mut hashes = Vec::new();
        hash::local_hashes(tokens, block_size, seed, &content, &mut hashes);
        hashes
    });
    buffers::pack(py, hashes.into_iter().map(u64::to_le_bytes))
}

/// Returns the packed sequence hashes of packed local hashes from the start of a sequence.
#[pyfunction]
pub fn sequence_hashes<'py>(py: Python<'py>, local: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let locals = buffers::words(local)?;
    let chain = || {
        let mut previous = 0;
        let chained = (0u32..).zip(locals.iter()).map(|(depth, local)| {
            previous = hash::sequence_hash(depth, previous, *local);
            previous
        });
        chained.collect::<Vec<u64>>()
    };
    let hashes = if locals.len() > LONG_CHAIN { py.detach(chain) } else { chain() };
    buffers::pack(py, hashes.into_iter().map(u64::to_le_bytes))
}
