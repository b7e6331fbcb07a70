//! The messages of call streams, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PySequence, PyString};

use super::token_writer::TokenWriter;
use crate::calls::{self, Call};
use crate::wire::Writer;

/// Reads the calls of a message that has only calls; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_calls(message: &[u8]) -> Option<Vec<Call<'_>>> {
    calls::calls_only(message)
}

/// Whole responses by number, and others by number and kind.
type Read<'py> = (Vec<(u64, Bound<'py, PyBytes>)>, Vec<(u64, i32, Bound<'py, PyBytes>)>);

/// Reads the responses of messages; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_responses<'py>(
    py: Python<'py>,
    messages: &Bound<'py, PySequence>,
    start: usize,
    most_bytes: usize,
    writers: &Bound<'py, PyDict>,
) -> PyResult<(Read<'py>, usize, usize)> {
    let (mut whole, mut others) = Read::default();
    let (mut taken, mut count, mut clock) = (0, 0, None);
    for at in start..messages.len()? {
        let message = messages.get_item(at)?;
        let message = message.cast::<PyBytes>()?.as_bytes();
        if !others.is_empty() || message.len() > most_bytes {
            break;
        }
        let Some((all_whole, all_others)) = calls::responses_only(message) else { break };
        for (number, response) in all_whole {
            if !writers.is_empty() && is_taken(py, number, response, writers, &mut clock)? {
                taken += 1;
            } else {
                whole.push((number, PyBytes::new(py, response)));
            }
        }
        others
            .extend(all_others.into_iter().map(|(number, kind, response)| (number, kind, PyBytes::new(py, response))));
        count += 1;
    }
    Ok(((whole, others), taken, count))
}

/// Returns whether the writer of a call takes a response. Removes one that does not.
fn is_taken(
    py: Python<'_>,
    number: u64,
    response: &[u8],
    writers: &Bound<'_, PyDict>,
    clock: &mut Option<i64>,
) -> PyResult<bool> {
    let Some(writer) = writers.get_item(number)? else { return Ok(false) };
    // A writer that fails does so again for the receiver of the call, who handles it.
    let is_taken = writer.cast::<TokenWriter>().is_ok_and(|each| {
        each.try_borrow_mut().is_ok_and(|each| TokenWriter::offer(each, py, response, clock).unwrap_or(false))
    });
    if !is_taken {
        writers.del_item(number)?;
    }
    Ok(is_taken)
}

/// Encodes calls; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn write_calls<'py>(py: Python<'py>, calls: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyBytes>> {
    let mut message = Writer::default();
    for call in calls {
        type Owned<'py> = (u64, u32, Bound<'py, PyBytes>, bool, Option<u32>, Bound<'py, PyString>);
        let (number, method, request, more, left, trace): Owned<'_> = call.extract()?;
        calls::write_call(&mut message, (number, method, request.as_bytes(), more, left, trace.to_str()?));
    }
    Ok(PyBytes::new(py, &message.0))
}

/// Encodes responses; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn write_responses<'py>(
    py: Python<'py>,
    whole: &Bound<'py, PyList>,
    others: &Bound<'py, PyList>,
) -> PyResult<Bound<'py, PyBytes>> {
    let mut message = Writer::default();
    for other in others {
        let (number, kind, response): (_, _, Bound<'py, PyBytes>) = other.extract()?;
        calls::write_response(&mut message, number, kind, response.as_bytes());
    }
    let whole: Vec<(u64, Bound<'py, PyBytes>)> = whole.iter().map(|one| one.extract()).collect::<PyResult<_>>()?;
    message.packed(5, whole.iter().map(|(number, _)| *number));
    for (_, response) in &whole {
        message.bytes(6, response.as_bytes());
    }
    Ok(PyBytes::new(py, &message.0))
}
