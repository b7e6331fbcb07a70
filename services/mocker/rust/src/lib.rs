//! The simulated engine of kvrouter's mocker and simulator, as the Python module `kvrouter.mocker.engine._native`.
//!
//! It tests the router, so it shares no code with the router's core and has block hashes of its own.

mod config;
mod engine;
mod fleet;
mod offloading;
mod pool;
mod python;
mod sequence;
mod types;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{Engine, Fleet, SharedStorage};
}
