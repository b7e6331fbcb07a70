//! The output of workers, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hash::TOKEN_BYTES;
use crate::outputs;

/// Reads the token ids of a response that has only tokens; see `kvrouter.core.reference.outputs`.
#[pyfunction]
pub fn read_tokens<'py>(py: Python<'py>, response: &[u8]) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let Some(tokens) = outputs::tokens_only(response) else { return Ok(None) };
    let tokens = tokens.chunks_exact(TOKEN_BYTES);
    PyTuple::new(py, tokens.map(|token| token.first_chunk().map_or(0, |token| u32::from_le_bytes(*token)))).map(Some)
}
