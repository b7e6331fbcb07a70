//! Python classes that learn the speed of ranks from first tokens.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::LastRow;
use crate::index::tree::ranks::Name;
use crate::load::cache_recency::CachedRank;
use crate::load::speeds::{Calibration, Factor, Speed};

/// Implements `kvrouter.core.interface.LatencyCalibration`.
#[pyclass(module = "kvrouter.core._native")]
pub struct LatencyCalibration {
    calibration: Calibration,
    last: LastRow,
}

#[pymethods]
impl LatencyCalibration {
    #[new]
    fn new() -> Self {
        Self { calibration: Calibration::new(), last: LastRow::default() }
    }

    #[getter]
    fn value(&self) -> f64 {
        self.calibration.value
    }

    fn set_ranks(&mut self, ranks: Vec<CachedRank>) {
        self.calibration.set_ranks(&ranks);
    }

    fn speed(&mut self, rank: Name, now: f64) -> Speed {
        self.calibration.speed(rank, now)
    }

    fn learn(&mut self, measured_ms: f64, forecast_ms: f64, speed: Speed, now: f64) {
        self.calibration.learn(measured_ms, forecast_ms, speed, now);
    }

    fn relative_latency<'py>(&mut self, py: Python<'py>, now: f64) -> PyResult<Bound<'py, PyBytes>> {
        self.last.packed(py, self.calibration.relative_latency(now))
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
