//! Python class for the cost terms of routing mode `forecast`.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::load::forecast::{Candidate, Fleet, Model, Request, cheapest, prompt_blocks};

/// `kvrouter.core.interface.ForecastChoice`.
type Choice<'py> = (usize, usize, i64, f64, f64, bool, bool, i64, bool, Bound<'py, PyBytes>);

/// Implements `kvrouter.core.interface.ForecastModel`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct ForecastModel(Model);

/// Rows that `choose` returns.
const ROWS: usize = 12;
/// Columns of whole numbers that `choose` takes, in order.
type Columns<'py> = [Bound<'py, PyAny>; 4];
/// Columns of `LoadColumns`, the last one of them of numbers with a fraction.
const LOADS: usize = 7;

fn column<T: Element>(py: Python<'_>, column: &Bound<'_, PyAny>, count: usize) -> PyResult<Vec<T>> {
    let values = PyBuffer::get(column)?.to_vec(py)?;
    if values.len() != count {
        return Err(PyValueError::new_err(format!("expected columns of {count} entries, received {}", values.len())));
    }
    Ok(values)
}

#[pymethods]
impl ForecastModel {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "parameters by name")]
    #[pyo3(signature = (*, prefill, decode, default_budget, base, crowd, shortage_ms, room, max_recomputations, output_tokens, fit_tokens))]
    fn new(
        prefill: [f64; 3],
        decode: [f64; 3],
        default_budget: i64,
        base: f64,
        crowd: f64,
        shortage_ms: f64,
        room: f64,
        max_recomputations: f64,
        output_tokens: f64,
        fit_tokens: i64,
    ) -> PyResult<Self> {
        if default_budget < 1 {
            return Err(PyValueError::new_err(format!(
                "expected a budget of 1 token or more, received {default_budget}"
            )));
        }
        Ok(Self(Model {
            prefill,
            decode,
            default_budget,
            base,
            crowd,
            shortage_ms,
            room,
            max_recomputations,
            output_tokens,
            fit_tokens,
        }))
    }

    #[expect(clippy::too_many_arguments, reason = "columns of several kinds")]
    fn choose<'py>(
        &self,
        py: Python<'py>,
        request: (i64, i64, f64, f64),
        loads: &[u8],
        request_limits: &Bound<'py, PyAny>,
        relative_latency: &Bound<'py, PyAny>,
        reuse_chance: &Bound<'py, PyAny>,
        columns: Columns<'py>,
        draw: &Bound<'py, PyAny>,
    ) -> PyResult<Choice<'py>> {
        let (prompt_tokens, block_size, calibration, now) = request;
        if prompt_tokens < 1 || block_size < 1 {
            return Err(PyValueError::new_err("expected 1 token or more, in the prompt and in a block"));
        }
        let request = Request { prompt_tokens, block_size, calibration, now };
        let (words, rest) = loads.as_chunks::<8>();
        let count = words.len() / LOADS;
        if !rest.is_empty() || words.len() != count * LOADS {
            return Err(PyValueError::new_err(format!(
                "expected {LOADS} packed columns, received {} bytes",
                loads.len()
            )));
        }
        let word = |column: usize, place: usize| words.get(column * count + place).copied().unwrap_or_default();
        let load = |column, place| i64::from_ne_bytes(word(column, place));
        let limits: Vec<f64> = column(py, request_limits, count)?;
        let latencies: Vec<f64> = column(py, relative_latency, count)?;
        let chances: Vec<f64> = column(py, reuse_chance, count)?;
        let columns: Vec<Vec<i64>> = columns.iter().map(|each| column(py, each, count)).collect::<PyResult<_>>()?;
        let [overlap, queued, total, budget] = columns.as_slice() else {
            return Err(PyValueError::new_err("expected four columns of integers"));
        };
        fn at<T: Copy + Default>(column: &[T], place: usize) -> T {
            column.get(place).copied().unwrap_or_default()
        }
        // Made where it is read: a list of a thousand takes as long to write as the terms.
        let candidate = |place: usize| Candidate {
            active_blocks: load(0, place),
            prefill_tokens: load(1, place),
            active_requests: load(2, place),
            leading_active_blocks: load(3, place),
            head_tokens: load(4, place),
            prefill_requests: load(5, place),
            head_since: f64::from_ne_bytes(word(6, place)),
            queued_blocks: at(queued, place),
            total_blocks: at(total, place),
            max_batched_tokens: at(budget, place),
            relative_latency: at(&latencies, place),
            reuse_chance: at(&chances, place),
        };
        let model = &self.0;
        let shares: Vec<f64> = (0..count).map(|place| model.share(&request, &candidate(place))).collect();
        let prefilling = (0..count).map(|place| load(5, place));
        let fleet = Fleet::of(&shares, total, prefilling);
        let blocks = prompt_blocks(&request, overlap.iter().copied().zip((0..count).map(|place| load(3, place))));
        let mut costs = Vec::with_capacity(count);
        let rows = PyBytes::new_with(py, ROWS * count * size_of::<f64>(), |to| {
            let mut rows = to.chunks_exact_mut((count * size_of::<f64>()).max(1));
            let mut rows: [_; ROWS] = std::array::from_fn(|_| rows.next().unwrap_or_default().chunks_exact_mut(8));
            for (place, (share, blocks)) in shares.iter().zip(&blocks).enumerate() {
                let terms = model.terms(&request, &candidate(place), *share, *blocks, &fleet);
                let cost = terms.cost();
                costs.push(cost);
                let values: [f64; ROWS] = [
                    terms.forecast,
                    terms.batch,
                    terms.work,
                    terms.output,
                    terms.shortage,
                    terms.eviction,
                    terms.copies,
                    terms.own,
                    terms.relative,
                    terms.new_tokens as f64,
                    f64::from(u8::from(terms.fit)),
                    cost,
                ];
                for (row, value) in rows.iter_mut().zip(values) {
                    if let Some(to) = row.next() {
                        to.copy_from_slice(&value.to_ne_bytes());
                    }
                }
            }
            Ok(())
        })?;
        let (open, cheapest) = cheapest(&costs, |place| at(&limits, place) - load(2, place) as f64 >= 1.0);
        let place = match cheapest.as_slice() {
            &[place] => place,
            _ => draw.call1((cheapest,))?.extract()?,
        };
        let (chosen, blocks) = (candidate(place), blocks.get(place).copied());
        let blocks = blocks.ok_or_else(|| PyValueError::new_err("expected one of the drawn places"))?;
        let terms = model.terms(&request, &chosen, at(&shares, place), blocks, &fleet);
        Ok((
            place,
            open,
            terms.new_tokens,
            terms.own,
            terms.forecast / terms.relative,
            terms.fit,
            chosen.head_tokens == 0,
            chosen.leading_active_blocks,
            chosen.total_blocks > 0 && chosen.active_blocks > chosen.total_blocks,
            rows,
        ))
    }
}
