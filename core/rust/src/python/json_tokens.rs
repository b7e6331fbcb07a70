//! Token ids as JSON arrays, as Python calls it.

use std::ops::Range;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
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

/// Takes the values of fields out of a JSON object; see `kvrouter.core.reference.json_tokens`.
#[pyfunction]
#[allow(clippy::type_complexity)]
pub fn split_json<'py>(
    py: Python<'py>,
    text: &Bound<'py, PyAny>,
    fields: Vec<PyBackedStr>,
) -> PyResult<Option<(Bound<'py, PyBytes>, Vec<Bound<'py, PyBytes>>, bool)>> {
    let text = buffers::bytes(text)?;
    let fields: Vec<&[u8]> = fields.iter().map(|field| field.as_bytes()).collect();
    let found = text.with(py, text.as_slice().len() > LONG, |text| json_fields::find_values(text, &fields));
    let (Some(mut found), text) = (found, text.as_slice()) else { return Ok(None) };
    let part = |range: Range<usize>| text.get(range).unwrap_or_default();
    let values = found.ranges.iter().map(|range| PyBytes::new(py, part(range.clone()))).collect();
    found.ranges.retain(|range| !range.is_empty());
    found.ranges.sort_by_key(|range| range.start);
    let (mut rest, mut at) = (Vec::new(), 0);
    for range in found.ranges {
        rest.extend_from_slice(part(at..range.start));
        rest.extend_from_slice(b"null");
        at = range.end;
    }
    rest.extend_from_slice(part(at..text.len()));
    Ok(Some((PyBytes::new(py, &rest), values, found.has_data_url)))
}

/// Writes token ids as a JSON array.
#[pyfunction]
pub fn tokens_to_json<'py>(py: Python<'py>, tokens: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyBytes>> {
    let tokens = buffers::tokens(tokens)?;
    let text = tokens.with(py, tokens.as_slice().len() > LONG, json_tokens::write);
    Ok(PyBytes::new(py, &text))
}
