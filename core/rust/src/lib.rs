//! The native core of kvrouter, as the Python module `kvrouter.core._native`.
//!
//! Without the feature `python` it is a library for other crates, of which only the public modules are used.

#![cfg_attr(not(feature = "python"), allow(dead_code))]

mod calls;
pub mod fair_lock;
mod grpc;
pub mod hash;
pub mod index;
mod json_fields;
mod json_tokens;
mod load;
mod nats;
mod outputs;
mod predicted;
pub mod publisher;
#[cfg(feature = "python")]
mod python;
mod storage;
mod vocabulary;
mod wire;

#[cfg(feature = "python")]
use pyo3::prelude::*;

#[cfg(feature = "python")]
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{
        ActiveSequences, ApplySummary, CacheRecency, EventBatch, EventRecorder, ForecastModel, LatencyCalibration,
        MeasuredFactor, MemoryBudget, Observations, PredictedIndex, PrefixIndex, find_json_value, first_token_outside,
        json_flaw, local_hashes, read_calls, read_messages, read_nats_messages, read_output, read_responses,
        sequence_hashes, split_json, tokens_from_json, tokens_to_json, write_calls, write_responses,
    };
}
