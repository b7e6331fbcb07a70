//! The native core of kvrouter, as the Python module `kvrouter.core._native`.

pub mod hash;
mod python;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::python::{local_hashes, sequence_hashes};
}
