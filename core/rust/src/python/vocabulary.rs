//! The check of token ids, as Python calls it.

use pyo3::prelude::*;

use super::buffers;
use crate::vocabulary;

/// Tokens that take some 20 µs, from where giving up the GIL pays.
const LONG: usize = 64 << 10;

/// Position of the first token id that a vocabulary does not have; see `kvrouter.core.reference.vocabulary`.
#[pyfunction]
pub fn first_token_outside(py: Python<'_>, tokens: &Bound<'_, PyAny>, vocabulary: u32) -> PyResult<Option<usize>> {
    let tokens = buffers::tokens(tokens)?;
    Ok(tokens.with(py, tokens.as_slice().len() > LONG, |tokens| vocabulary::first_outside(tokens, vocabulary)))
}
