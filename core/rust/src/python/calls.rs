//! The messages of call streams, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::calls;
use crate::wire::Writer;

type Call<'a> = (u64, u32, &'a [u8], bool, Option<u32>, &'a str);
type Responses<'a> = (Vec<(u64, &'a [u8])>, Vec<(u64, i32, &'a [u8])>);

/// Reads the calls of a message that has only calls; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_calls(message: &[u8]) -> Option<Vec<Call<'_>>> {
    let calls = calls::calls_only(message)?.into_iter();
    Some(
        calls
            .map(|call| (call.number, call.method, call.request, call.more, call.time_left_ms, call.trace_context))
            .collect(),
    )
}

/// Reads the responses of a message that has only responses; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_responses(message: &[u8]) -> Option<Responses<'_>> {
    calls::responses_only(message).map(|responses| (responses.whole, responses.others))
}

/// Encodes calls; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn write_calls<'py>(py: Python<'py>, calls: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyBytes>> {
    let mut message = Writer::default();
    for call in calls {
        let (number, method, request, more, time_left_ms, trace_context): (
            _,
            _,
            Bound<'py, PyBytes>,
            _,
            _,
            Bound<'py, PyString>,
        ) = call.extract()?;
        let (request, trace_context) = (request.as_bytes(), trace_context.to_str()?);
        calls::write_call(&mut message, &calls::Call { number, method, request, more, time_left_ms, trace_context });
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
