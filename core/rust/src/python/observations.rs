//! Python class for the observations of a histogram.

use pyo3::prelude::*;

/// Implements `kvrouter.core.reference.Observations`.
#[pyclass(module = "kvrouter.core._native")]
pub struct Observations {
    bounds: Vec<f64>,
    #[pyo3(get)]
    counts: Vec<u64>,
    #[pyo3(get)]
    sum: f64,
}

#[pymethods]
impl Observations {
    #[new]
    fn new(bounds: Vec<f64>) -> Self {
        let counts = vec![0; bounds.len() + 1];
        Self { bounds, counts, sum: 0.0 }
    }

    #[pyo3(signature = (total, count=1))]
    pub fn observe(&mut self, total: f64, count: u32) {
        self.sum += total;
        let value = total / f64::from(count);
        if let Some(counted) = self.counts.get_mut(self.bounds.partition_point(|bound| *bound < value)) {
            *counted += u64::from(count);
        }
    }
}
