//! The messages of call streams, as Python calls it.

use pyo3::prelude::*;

use crate::calls;

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
