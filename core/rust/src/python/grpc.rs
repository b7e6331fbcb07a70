//! gRPC messages in frames of HTTP/2, as Python calls it.

use pyo3::prelude::*;

use crate::grpc;

/// Stream, messages, number of short frames, size of the payloads and of the frames.
type Messages<'a> = (u32, Vec<&'a [u8]>, usize, usize, usize);

/// Reads the messages from a position of an input on; see `kvrouter.core.reference.grpc`.
#[pyfunction]
pub fn read_messages(data: &[u8], start: usize, short_bytes: usize) -> Messages<'_> {
    let read = grpc::whole_messages(data.get(start..).unwrap_or_default(), short_bytes);
    (read.stream, read.messages, read.short_frames, read.payload_bytes, read.bytes)
}
