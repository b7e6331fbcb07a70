//! The messages of call streams, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString};

use crate::calls::{self, Call, Responses};
use crate::wire::Writer;

/// Reads the calls of a message that has only calls; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_calls(message: &[u8]) -> Option<Vec<Call<'_>>> {
    calls::calls_only(message)
}

/// Reads the responses of a message that has only responses; see `kvrouter.core.reference.calls`.
#[pyfunction]
pub fn read_responses(message: &[u8]) -> Option<Responses<'_>> {
    calls::responses_only(message)
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
