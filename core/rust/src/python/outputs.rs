//! The output of workers, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::hash::TOKEN_BYTES;
use crate::outputs;

/// Token ids, finish reason and cached tokens.
type Output<'py> = (Bound<'py, PyTuple>, i32, Option<u32>);

/// Reads a response without rare fields; see `kvrouter.core.reference.outputs`.
#[pyfunction]
pub fn read_output<'py>(py: Python<'py>, response: &[u8]) -> PyResult<Option<Output<'py>>> {
    let Some(output) = outputs::plain_output(response) else { return Ok(None) };
    let tokens = output.tokens.chunks_exact(TOKEN_BYTES);
    let tokens = tokens.map(|token| token.first_chunk().map_or(0, |token| u32::from_le_bytes(*token)));
    Ok(Some((PyTuple::new(py, tokens)?, output.finish_reason, output.cached_tokens)))
}
