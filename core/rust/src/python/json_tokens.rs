//! Token ids as JSON arrays, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::{buffers, interface};
use crate::{json_fields, json_tokens};

/// Bytes of text that take some 20 µs, from where giving up the GIL pays.
const LONG: usize = 32 << 10;

/// The same of text that is only searched, which takes a tenth of the time for a list of token ids. Without the GIL, a
/// text that Python code could change is copied first.
const LONG_SEARCH: usize = 1 << 20;

/// Reads a JSON array of token ids; see `kvrouter.core.reference.json_tokens`.
#[pyfunction]
pub fn tokens_from_json<'py>(py: Python<'py>, text: &Bound<'py, PyAny>, limit: usize) -> PyResult<Bound<'py, PyBytes>> {
    let text = buffers::bytes(text)?;
    match text.with(py, text.as_slice().len() > LONG, |text| json_tokens::read(text, limit)) {
        Ok(tokens) => Ok(PyBytes::new(py, &tokens)),
        Err(error) => Err(PyErr::from_value(interface(py, "NotATokenId")?.call1((error.index,))?)),
    }
}

/// Where in a JSON object the value of a field is; see `kvrouter.core.reference.json_tokens`.
#[pyfunction]
pub fn find_json_value(py: Python<'_>, text: &Bound<'_, PyAny>, field: &str) -> PyResult<Option<(usize, usize)>> {
    let text = buffers::bytes(text)?;
    let found =
        text.with(py, text.as_slice().len() > LONG_SEARCH, |text| json_tokens::find_value(text, field.as_bytes()));
    Ok(found.map(|range| (range.start, range.end)))
}

/// Why a JSON text cannot be passed on, or an empty text; see `kvrouter.core.reference.json_tokens`.
#[pyfunction]
pub fn json_flaw(py: Python<'_>, text: &Bound<'_, PyAny>) -> PyResult<String> {
    let text = buffers::bytes(text)?;
    Ok(text.with(py, text.as_slice().len() > LONG, json_fields::flaw).unwrap_or_default())
}

/// Writes token ids as a JSON array.
#[pyfunction]
pub fn tokens_to_json<'py>(py: Python<'py>, tokens: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let tokens = buffers::tokens(tokens)?;
    let text = tokens.with(py, tokens.as_slice().len() > LONG, json_tokens::write);
    Ok(PyBytes::new(py, &text))
}
