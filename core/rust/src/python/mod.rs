//! The Python module `kvrouter.core._native`. It converts between Python objects and the core, and contains no logic.

mod buffers;
mod cache_recency;
mod calls;
mod dump;
mod event_batch;
mod event_recorder;
mod exclusive;
mod forecast;
mod grpc;
mod hashing;
mod json_tokens;
mod nats;
mod observations;
mod outputs;
mod predicted;
mod prefix_index;
mod sequences;
mod shared;
mod speeds;
mod vocabulary;

pub use cache_recency::CacheRecency;
pub use calls::{read_calls, read_responses, write_calls, write_responses};
pub use event_batch::EventBatch;
pub use event_recorder::EventRecorder;
pub use forecast::ForecastModel;
pub use grpc::read_messages;
pub use hashing::{local_hashes, sequence_hashes};
pub use json_tokens::{find_json_value, json_flaw, split_json, tokens_from_json, tokens_to_json};
pub use nats::read_nats_messages;
pub use observations::Observations;
pub use outputs::read_output;
pub use predicted::PredictedIndex;
pub use prefix_index::{ApplySummary, MemoryBudget, PrefixIndex};
pub use sequences::ActiveSequences;
pub use speeds::{LatencyCalibration, MeasuredFactor};
pub use vocabulary::first_token_outside;

use pyo3::prelude::*;

/// Returns a class of `kvrouter.core.interface`.
fn interface<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("kvrouter.core.interface")?.getattr(name)
}
