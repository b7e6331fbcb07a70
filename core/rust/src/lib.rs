//! The native core of kvrouter, as the Python module `kvrouter.core._native`.

pub mod apply;
mod blocks;
mod figures;
mod floating;
pub mod hash;
pub mod index;
mod memory;
mod pages;
mod python;
mod query;
pub mod ranks;
mod remove;
mod runs;
mod state;
mod store;
mod table;
mod tagmap;
mod wire;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{ApplySummary, PrefixIndex, local_hashes, sequence_hashes};
}
