//! The Python module `kvrouter.core._native`. It converts between Python objects and the core, and contains no logic.

mod buffers;
mod cache_recency;
mod calls;
mod chunk_writer;
mod dump;
mod event_batch;
mod event_recorder;
mod exclusive;
mod forecast;
mod grpc;
mod hashing;
mod json_tokens;
mod matches;
mod nats;
mod observations;
mod output_writer;
mod outputs;
mod passed_stream;
mod predicted;
mod prefix_index;
mod sequences;
mod shared;
mod speeds;
mod token_writer;
mod vocabulary;

use pyo3::prelude::*;

/// Returns a class of `kvrouter.core.interface`.
fn interface<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    py.import("kvrouter.core.interface")?.getattr(name)
}

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::{
        cache_recency::CacheRecency,
        calls::{read_calls, read_responses, write_calls, write_responses},
        chunk_writer::ChunkWriter,
        event_batch::EventBatch,
        event_recorder::EventRecorder,
        forecast::ForecastModel,
        grpc::read_messages,
        hashing::{local_hashes, sequence_hashes},
        json_tokens::{find_json_value, json_flaw, split_json, tokens_from_json, tokens_to_json},
        matches::read_matches,
        nats::read_nats_messages,
        observations::Observations,
        output_writer::OutputWriter,
        outputs::read_output,
        passed_stream::{PassedStream, pass_pieces},
        predicted::PredictedIndex,
        prefix_index::{ApplySummary, MemoryBudget, PrefixIndex},
        sequences::ActiveSequences,
        speeds::{LatencyCalibration, MeasuredFactor},
        token_writer::TokenWriter,
        vocabulary::first_token_outside,
    };
}
