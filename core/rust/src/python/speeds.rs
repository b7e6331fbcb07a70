//! Python classes that learn the speed of ranks from first tokens.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::pack;
use crate::index::tree::ranks::Name;
use crate::load::cache_recency::CachedRank;
use crate::load::speeds::{Calibration, Factor, Speed};

/// Implements `kvrouter.core.interface.LatencyCalibration`.
#[pyclass(module = "kvrouter.core._native")]
pub struct LatencyCalibration(Calibration);

#[pymethods]
impl LatencyCalibration {
    #[new]
    fn new() -> Self {
        Self(Calibration::new())
    }

    #[getter]
    fn value(&self) -> f64 {
        self.0.value
    }

    fn set_ranks(&mut self, ranks: Vec<CachedRank>) {
        self.0.set_ranks(&ranks);
    }

    fn speed(&mut self, rank: Name, now: f64) -> Speed {
        self.0.speed(rank, now)
    }

    fn learn(&mut self, measured_ms: f64, forecast_ms: f64, speed: Speed, now: f64) {
        self.0.learn(measured_ms, forecast_ms, speed, now);
    }

    fn relative_latency<'py>(&mut self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyBytes>> {
        pack(py, self.0.relative_latency(now).iter().map(|latency| latency.to_ne_bytes()))
    }
}

/// Implements `kvrouter.core.interface.MeasuredFactor`.
#[pyclass(module = "kvrouter.core._native")]
pub struct MeasuredFactor(Factor);

#[pymethods]
impl MeasuredFactor {
    #[new]
    fn new() -> Self {
        Self(Factor::new())
    }

    #[getter]
    fn count(&self) -> u64 {
        self.0.count
    }

    fn value(&self, now: f64) -> f64 {
        self.0.value(now)
    }

    fn observe(&mut self, measured_ms: f64, modelled_ms: f64, now: f64) {
        self.0.observe(measured_ms, modelled_ms, now);
    }
}
