//! The native core of kvrouter, as the Python module `kvrouter.core._native`.

mod active_blocks;
pub mod apply;
mod blocks;
mod departure;
mod ebb;
mod figures;
mod floating;
pub mod hash;
mod holders;
mod holding;
pub mod index;
mod keys;
mod labels;
mod memory;
mod naming;
mod pages;
mod predicted;
mod python;
mod query;
pub mod ranks;
mod remove;
mod runs;
mod scratch;
mod sequences;
mod state;
mod store;
mod table;
mod tagline;
mod tagmap;
mod tidy;
mod tombstones;
pub mod turns;
mod users;
mod wire;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{ActiveSequences, ApplySummary, PredictedIndex, PrefixIndex, local_hashes, sequence_hashes};
}
