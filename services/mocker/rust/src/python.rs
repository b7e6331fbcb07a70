//! Python bindings. Requests are identified by numbers; the Python side validates all arguments.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::config::{Config, TierConfig, TimeModel};
use crate::engine::Engine as Model;
use crate::fleet::Fleet as Engines;
use crate::offloading::Parts;
use crate::sequence::Request;
use crate::types::{Event, Finish};

type Coefficients = (f64, f64, f64, f64, f64, f64, f64);

/// (num_blocks, block_size, max_batched_tokens, max_sequences, length_limit, prefix_caching, speed, vocabulary_size,
/// coefficients, host memory, shared storage)
type Settings = (usize, usize, usize, usize, usize, bool, f64, u64, Coefficients, TierSettings, TierSettings);

/// (num_blocks, seconds of a load besides its blocks, seconds of a block)
type TierSettings = (usize, f64, f64);

fn tier((num_blocks, latency_s, block_s): TierSettings) -> TierConfig {
    TierConfig { num_blocks, latency_s, block_s }
}

fn config(settings: Settings) -> PyResult<Config> {
    let (
        num_blocks,
        block_size,
        max_batched_tokens,
        max_sequences,
        length_limit,
        prefix_caching,
        speed,
        vocabulary_size,
        time,
        host,
        shared,
    ) = settings;
    if block_size == 0 || num_blocks == 0 || num_blocks > u32::MAX as usize || max_batched_tokens < max_sequences {
        return Err(PyValueError::new_err("no engine can run with these settings"));
    }
    let (prefill_n2_ms, prefill_n1_ms, prefill_n0_ms, decode_p2_ms, decode_p1_ms, decode_p0_ms, decode_floor_ms) = time;
    let time_model = TimeModel {
        prefill_n2_ms,
        prefill_n1_ms,
        prefill_n0_ms,
        decode_p2_ms,
        decode_p1_ms,
        decode_p0_ms,
        decode_floor_ms,
    };
    Ok(Config {
        num_blocks,
        block_size,
        max_batched_tokens,
        max_sequences,
        length_limit,
        prefix_caching,
        speed,
        vocabulary_size,
        time_model,
        tiers: [tier(host), tier(shared)],
    })
}

fn pack_hashes<'py>(py: Python<'py>, hashes: &[u64]) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, hashes.len() * 8, |to| {
        for (to, hash) in to.chunks_exact_mut(8).zip(hashes) {
            to.copy_from_slice(&hash.to_le_bytes());
        }
        Ok(())
    })
}

/// (hashes, parent or None, tokens, root, tier) for a store, (hashes, tier) for a removal, () if all was cleared.
fn event_tuple<'py>(py: Python<'py>, event: &Event) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        Event::Stored { parent, hashes, tokens, root, tier } => {
            (pack_hashes(py, hashes)?, *parent, PyBytes::new(py, tokens), *root, *tier as u8).into_pyobject(py)
        }
        Event::Removed { hashes, tier } => (pack_hashes(py, hashes)?, *tier as u8).into_pyobject(py),
        Event::Cleared => Ok(PyTuple::empty(py)),
    }
}

/// A storage that several engines share.
#[pyclass(frozen, module = "kvrouter.mocker.engine._native")]
pub struct SharedStorage(Parts);

#[pymethods]
impl SharedStorage {
    #[new]
    fn new() -> Self {
        Self(Parts::default())
    }
}

/// One engine; `kvrouter.mocker.engine.native` wraps it in the interface of `kvrouter.mocker.engine.reference`.
#[pyclass(module = "kvrouter.mocker.engine._native")]
pub struct Engine {
    model: Model,
}

#[pymethods]
impl Engine {
    #[new]
    fn new(settings: Settings, shared: &SharedStorage) -> PyResult<Self> {
        Ok(Self { model: Model::new(config(settings)?, true, &shared.0) })
    }

    fn waiting(&self) -> usize {
        self.model.waiting()
    }

    #[expect(clippy::too_many_arguments, reason = "one crossing for each request")]
    fn submit(
        &mut self,
        number: u64,
        prompt: &[u8],
        max_tokens: usize,
        root: u64,
        stream: u64,
        stop: Vec<u32>,
        now: f64,
        received: bool,
        min_tokens: usize,
        ends_after: Option<usize>,
        output: Vec<u32>,
    ) -> PyResult<()> {
        if self.model.holds(number) {
            return Err(PyValueError::new_err(format!("request {number} is already running or waiting")));
        }
        let prompt = prompt.to_vec();
        let request =
            Request { number, prompt, max_tokens, received, root, stream, stop, min_tokens, ends_after, output };
        self.model.submit(request, now);
        Ok(())
    }

    /// Returns ((seconds, prefill tokens, tokens reused, decoding sequences, preempted), events); None without work.
    fn begin_step<'py>(&mut self, py: Python<'py>, now: f64) -> PyResult<Option<Bound<'py, PyTuple>>> {
        if self.model.in_step() {
            return Err(PyRuntimeError::new_err("a step is already running: call end_step first"));
        }
        let Some(step) = self.model.begin_step(now) else { return Ok(None) };
        let events: Vec<_> = self.model.events.iter().map(|event| event_tuple(py, event)).collect::<PyResult<_>>()?;
        self.model.events.clear();
        let totals = (step.seconds, step.prefill_tokens, step.reused_tokens, step.decode_sequences, step.preempted);
        Ok(Some((totals, PyList::new(py, events)?).into_pyobject(py)?))
    }

    /// Returns for each output (number, token, finish: 0 none, 1 length, 2 stop, first, cached tokens, submitted at,
    /// scheduled at, tokens loaded from host memory, from shared storage).
    #[expect(clippy::type_complexity, reason = "a row")]
    fn end_step(&mut self, now: f64) -> PyResult<Vec<(u64, u32, u8, bool, usize, f64, f64, usize, usize)>> {
        if !self.model.in_step() {
            return Err(PyRuntimeError::new_err("no step is running: call begin_step first"));
        }
        let mut rows = Vec::new();
        self.model.end_step(now, |output| {
            let finish = match output.finish {
                Finish::No => 0,
                Finish::Length => 1,
                Finish::Stop => 2,
            };
            rows.push((
                output.number,
                output.token,
                finish,
                output.first,
                output.cached_tokens,
                output.submitted_at,
                output.scheduled_at,
                output.loaded_tokens[0],
                output.loaded_tokens[1],
            ));
        });
        Ok(rows)
    }

    /// Returns (cached tokens, submitted at, scheduled at, tokens loaded from host memory, from shared storage); None if
    /// the request is unknown.
    fn abort(&mut self, number: u64) -> Option<(usize, f64, f64, usize, usize)> {
        self.model.abort(number)
    }

    fn clear_cache(&mut self) {
        self.model.clear_cache();
    }

    /// Returns (running, waiting, active blocks, cached blocks, prefill tokens).
    fn load(&self) -> (usize, usize, usize, usize, usize) {
        let load = self.model.load();
        (load.running, load.waiting, load.active_blocks, load.cached_blocks, load.prefill_tokens)
    }

    /// Returns (hash, parent or None, tokens, root, copies) of each cached block.
    #[expect(clippy::type_complexity, reason = "a row")]
    fn table<'py>(&self, py: Python<'py>) -> PyResult<Vec<(u64, Option<u64>, Bound<'py, PyBytes>, u64, usize)>> {
        self.model
            .table()
            .map(|row| Ok((row.hash, row.parent, PyBytes::new(py, row.tokens), row.root, row.copies)))
            .collect()
    }
}

/// Engines in virtual time; `kvrouter.simulator.engines.fleet` documents it.
#[pyclass(module = "kvrouter.mocker.engine._native")]
pub struct Fleet {
    engines: Engines,
    count: usize,
}

impl Fleet {
    fn checked(&self, engine: usize) -> PyResult<usize> {
        if engine < self.count {
            Ok(engine)
        } else {
            Err(PyValueError::new_err(format!("there is no engine {engine}")))
        }
    }
}

#[pymethods]
impl Fleet {
    #[new]
    fn new(settings: Vec<Settings>, record_events: bool) -> PyResult<Self> {
        let configs = settings.into_iter().map(config).collect::<PyResult<Vec<_>>>()?;
        Ok(Self { count: configs.len(), engines: Engines::new(configs, record_events) })
    }

    #[getter]
    fn now(&self) -> f64 {
        self.engines.now
    }

    #[expect(clippy::too_many_arguments, reason = "one crossing for each request")]
    fn submit(
        &mut self,
        engine: usize,
        number: u64,
        prompt: &[u8],
        max_tokens: usize,
        root: u64,
        stream: u64,
        received: bool,
    ) -> PyResult<()> {
        let engine = self.checked(engine)?;
        let request = Request {
            number,
            prompt: prompt.to_vec(),
            max_tokens,
            received,
            root,
            stream,
            stop: Vec::new(),
            min_tokens: 0,
            ends_after: None,
            output: Vec::new(),
        };
        self.engines.submit(engine, request);
        Ok(())
    }

    fn restart(&mut self, engine: usize) -> PyResult<()> {
        let engine = self.checked(engine)?;
        self.engines.restart(engine);
        Ok(())
    }

    /// Returns the notices as (at, engine, number, output tokens so far, cached tokens, finished, tokens loaded from host
    /// memory, from shared storage).
    #[expect(clippy::type_complexity, reason = "a row")]
    fn advance(&mut self, py: Python<'_>, until: f64) -> Vec<(f64, usize, u64, usize, usize, bool, usize, usize)> {
        let engines = &mut self.engines;
        py.detach(|| engines.advance(until));
        let rows = engines.notices.drain(..);
        rows.map(|n| {
            let [host, shared] = n.loaded_tokens;
            (n.at, n.engine, n.number, n.generated, n.cached_tokens, n.finished, host, shared)
        })
        .collect()
    }

    /// Returns the cache events since the last call as (at, engine, event).
    fn take_events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let rows = self
            .engines
            .events
            .iter()
            .map(|made| Ok((made.at, made.engine, event_tuple(py, &made.event)?)))
            .collect::<PyResult<Vec<_>>>()?;
        self.engines.events.clear();
        PyList::new(py, rows)
    }

    /// Returns (running, waiting, active blocks, cached blocks, prefill tokens) of an engine.
    fn load(&self, engine: usize) -> PyResult<(usize, usize, usize, usize, usize)> {
        let Some(model) = self.engines.engine(engine) else {
            return Err(PyValueError::new_err(format!("there is no engine {engine}")));
        };
        let load = model.load();
        Ok((load.running, load.waiting, load.active_blocks, load.cached_blocks, load.prefill_tokens))
    }

    /// Returns the seconds between tokens, sorted, as packed little-endian f32.
    fn sorted_gaps<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let gaps = &mut self.engines.gaps;
        gaps.sort_unstable_by(f32::total_cmp);
        PyBytes::new_with(py, gaps.len() * 4, |to| {
            for (to, gap) in to.chunks_exact_mut(4).zip(gaps) {
                to.copy_from_slice(&gap.to_le_bytes());
            }
            Ok(())
        })
    }

    /// Returns (steps, preemptions, tokens reused, busy seconds by engine).
    fn totals(&self) -> (u64, u64, u64, Vec<f64>) {
        let engines = &self.engines;
        (engines.steps, engines.preemptions, engines.reused_tokens, engines.busy_seconds.clone())
    }
}
