//! The native core of kvrouter, as the Python module `kvrouter.core._native`.

pub mod fair_lock;
pub mod hash;
pub mod index;
mod json_tokens;
mod load;
mod predicted;
mod python;
mod storage;
mod wire;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{
        ActiveSequences, ApplySummary, EventBatch, ForecastModel, MemoryBudget, PredictedIndex, PrefixIndex,
        find_json_value, local_hashes, sequence_hashes, tokens_from_json, tokens_to_json,
    };
}
