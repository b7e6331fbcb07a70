//! Pieces of streamed responses that a gateway shows, as Python calls it.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::{grpc, passed_stream};

/// Implements `kvrouter.core.reference.PassedStream`.
#[pyclass(module = "kvrouter.core._native")]
pub struct PassedStream(passed_stream::PassedStream);

#[pymethods]
impl PassedStream {
    #[new]
    #[pyo3(signature = (*, sends_back, hidden=Vec::new()))]
    fn new(sends_back: bool, hidden: Vec<Vec<u8>>) -> Self {
        Self(passed_stream::PassedStream { sends_back, hidden, ..Default::default() })
    }

    #[getter]
    fn get_limit(&self) -> i64 {
        self.0.limit
    }

    #[setter]
    fn set_limit(&mut self, limit: i64) {
        self.0.limit = limit;
    }

    #[getter]
    fn get_is_held(&self) -> bool {
        self.0.is_held
    }

    #[setter]
    fn set_is_held(&mut self, is_held: bool) {
        self.0.is_held = is_held;
    }

    fn begin(&mut self, most_received: i64, most_sent: i64) {
        (self.0.most_received, self.0.most_sent) = (most_received, usize::try_from(most_sent).unwrap_or_default());
    }

    fn moved(&mut self) -> (usize, usize) {
        (std::mem::take(&mut self.0.received), std::mem::take(&mut self.0.sent))
    }

    fn taken<'py>(&mut self, py: Python<'py>) -> (i64, Bound<'py, PyBytes>) {
        let passed = std::mem::take(&mut self.0.passed);
        (std::mem::take(&mut self.0.tokens), PyBytes::new(py, &passed))
    }
}

/// Frames of the answers, the call that is due, short frames, pieces, bytes of the payloads and of the frames.
type Passed<'py> = (Bound<'py, PyBytes>, Option<u32>, usize, usize, usize, usize);

/// Answers pieces from a position of an input on; see `kvrouter.core.reference.passed_stream`.
#[pyfunction]
pub fn pass_pieces<'py>(
    data: &Bound<'py, PyBytes>,
    start: usize,
    short_bytes: usize,
    most_bytes: i64,
    streams: &Bound<'py, PyDict>,
) -> PyResult<Passed<'py>> {
    let input = data.as_bytes().get(start..).unwrap_or_default();
    let most_bytes = usize::try_from(most_bytes).unwrap_or_default();
    let (mut answers, mut due) = (Vec::new(), None);
    let (mut short_frames, mut pieces, mut payload_bytes, mut bytes, mut sent) = (0, 0, 0, 0, 0);
    while let Some((number, payload)) = input.get(bytes..).and_then(grpc::data)
        && due.is_none()
    {
        let Some(stream) = streams.get_item(number)? else { break };
        let Some(message) = grpc::only_message(payload) else { break };
        let stream = &mut stream.cast::<PassedStream>()?.borrow_mut().0;
        let most = (most_bytes.saturating_sub(sent)).min(grpc::MAX_FRAME_BYTES);
        let around = grpc::MESSAGE_HEADER_BYTES;
        let Some(answer) = stream.answer(message, around, most.saturating_sub(around)) else { break };
        grpc::write_message(&mut answers, number, &answer);
        sent += answer.len() + around;
        short_frames += usize::from(payload.len() < short_bytes);
        pieces += 1;
        payload_bytes += payload.len();
        bytes += grpc::FRAME_HEADER_BYTES + payload.len();
        due = stream.is_due().then_some(number);
    }
    Ok((PyBytes::new(data.py(), &answers), due, short_frames, pieces, payload_bytes, bytes))
}
