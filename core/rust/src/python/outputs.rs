//! The output of workers, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hash::TOKEN_BYTES;
use crate::outputs;

/// Token ids, finish reason and cached tokens.
type Output<'py> = (Bound<'py, PyTuple>, i32, Option<u32>);

/// Reads the token ids of a response that has only tokens; see `kvrouter.core.reference.outputs`.
#[pyfunction]
pub fn read_tokens<'py>(py: Python<'py>, response: &[u8]) -> PyResult<Option<Bound<'py, PyTuple>>> {
    outputs::tokens_only(response).map(|tokens| token_ids(py, tokens)).transpose()
}

/// Reads a response without rare fields; see `kvrouter.core.reference.outputs`.
#[pyfunction]
pub fn read_output<'py>(py: Python<'py>, response: &[u8]) -> PyResult<Option<Output<'py>>> {
    let Some(output) = outputs::plain_output(response) else { return Ok(None) };
    Ok(Some((token_ids(py, output.tokens)?, output.finish_reason, output.cached_tokens)))
}

fn token_ids<'py>(py: Python<'py>, tokens: &[u8]) -> PyResult<Bound<'py, PyTuple>> {
    let tokens = tokens.chunks_exact(TOKEN_BYTES);
    PyTuple::new(py, tokens.map(|token| token.first_chunk().map_or(0, |token| u32::from_le_bytes(*token))))
}
