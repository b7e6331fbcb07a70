//! Hashing, as Python calls it.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers;
use crate::hash;

/// Local hashes of the full blocks of a prompt, packed.
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
    let hashes = hash_tokens(&tokens, block_size, scope, multimodal)?;
    buffers::pack(py, &hashes)
}

/// Local hashes of tokens that are bytes already.
pub fn hash_tokens(
    tokens: &buffers::Bytes<'_, '_>,
    block_size: i64,
    scope: Option<&Bound<'_, PyAny>>,
    multimodal: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u64>> {
    let Some(block_size) = usize::try_from(block_size).ok().filter(|size| *size > 0) else {
        return Err(PyValueError::new_err("block_size must be 1 or more"));
    };
    let mut hashes = Vec::new();
    let content = buffers::multimodal(multimodal)?;
    hash::local_hashes(tokens.as_slice(), block_size, buffers::seed(scope)?, &content, &mut hashes);
    Ok(hashes)
}

/// Sequence hashes of a chain that starts a sequence, packed, from its packed local hashes.
#[pyfunction]
pub fn sequence_hashes<'py>(py: Python<'py>, local: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let packed = buffers::packed_hashes(local)?;
    let mut previous = 0;
    let mut hashes = Vec::with_capacity(packed.as_slice().len() / 8);
    for (depth, local) in packed.as_slice().chunks_exact(8).enumerate() {
        let local = u64::from_le_bytes(local.try_into().unwrap_or_default());
        previous = if depth == 0 { local } else { hash::chain(previous, local) };
        hashes.push(previous);
    }
    buffers::pack(py, &hashes)
}
