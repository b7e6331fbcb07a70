//! Python class for the cost terms of routing mode `forecast`.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::pack;
use crate::load::forecast::{Candidate, Fleet, Model, Request, cheapest, prompt_blocks};

/// `kvrouter.core.interface.ForecastChoice`.
type Choice<'py> = (usize, usize, i64, f64, f64, bool, bool, i64, bool, Bound<'py, PyBytes>);

/// Implements `kvrouter.core.interface.ForecastModel`.
#[pyclass(frozen, module = "kvrouter.core._native")]
pub struct ForecastModel(Model);

/// Columns of `LoadColumns`.
const LOADS: usize = 7;
/// The other columns that `choose` takes, in order.
type Columns<'py> = [Bound<'py, PyBytes>; 7];
/// A column of packed numbers of 64 bits.
type Column<'a> = &'a [[u8; 8]];

fn whole(column: Column<'_>, place: usize) -> i64 {
    column.get(place).map_or(0, |word| i64::from_ne_bytes(*word))
}

fn real(column: Column<'_>, place: usize) -> f64 {
    column.get(place).map_or(0.0, |word| f64::from_ne_bytes(*word))
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

    fn choose<'py>(
        &self,
        py: Python<'py>,
        request: (i64, i64, f64, f64),
        loads: &[u8],
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
        let loads: [Column<'_>; LOADS] =
            std::array::from_fn(|at| words.get(at * count..(at + 1) * count).unwrap_or_default());
        let [active, prefill_tokens, requests, leading, head_tokens, prefill_requests, head_since] = loads;
        if let Some(other) = columns.iter().find(|column| column.as_bytes().len() != count * size_of::<u64>()) {
            let received = other.as_bytes().len();
            return Err(PyValueError::new_err(format!(
                "expected columns of {count} entries, received {received} bytes"
            )));
        }
        let [overlap, queued, total, budget, limits, latencies, chances] =
            columns.each_ref().map(|column| column.as_bytes().as_chunks().0);
        // Made where it is read: a list of a thousand takes as long to write as the terms.
        let candidate = |place: usize| Candidate {
            active_blocks: whole(active, place),
            prefill_tokens: whole(prefill_tokens, place),
            active_requests: whole(requests, place),
            leading_active_blocks: whole(leading, place),
            head_tokens: whole(head_tokens, place),
            prefill_requests: whole(prefill_requests, place),
            head_since: real(head_since, place),
            queued_blocks: whole(queued, place),
            total_blocks: whole(total, place),
            max_batched_tokens: whole(budget, place),
            relative_latency: real(latencies, place),
            reuse_chance: real(chances, place),
        };
        let all = |column| (0..count).map(move |place| whole(column, place));
        let model = &self.0;
        let shares: Vec<f64> = (0..count).map(|place| model.share(&request, &candidate(place))).collect();
        let fleet = Fleet::of(&shares, all(total), all(prefill_requests));
        let blocks = prompt_blocks(&request, all(overlap).zip(all(leading)));
        let costs: Vec<f64> = shares
            .iter()
            .zip(&blocks)
            .enumerate()
            .map(|(place, (share, blocks))| model.terms(&request, &candidate(place), *share, *blocks, &fleet).cost())
            .collect();
        let (open, cheapest) = cheapest(&costs, |place| real(limits, place) - whole(requests, place) as f64 >= 1.0);
        let place = match cheapest.as_slice() {
            &[place] => place,
            _ => draw.call1((cheapest,))?.extract()?,
        };
        let (Some(share), Some(blocks)) = (shares.get(place), blocks.get(place)) else {
            return Err(PyValueError::new_err("expected one of the places"));
        };
        let chosen = candidate(place);
        let terms = model.terms(&request, &chosen, *share, *blocks, &fleet);
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
            pack(py, costs.iter().map(|cost| cost.to_ne_bytes()))?,
        ))
    }
}
