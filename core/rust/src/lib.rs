//! The native core of kvrouter, as the Python module `kvrouter.core._native`.

use pyo3::prelude::*;

#[pymodule]
mod _native {}
