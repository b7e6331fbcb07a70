//! Engines in virtual time. While an engine has work, its steps follow each other without a pause.

use crate::config::Config;
use crate::engine::Engine;
use crate::offloading::Parts;
use crate::sequence::Request;
use crate::types::{Event, Finish};

/// What the caller of an engine observes of one request: its first token, each block that its output begins, its end.
pub struct Notice {
    pub at: f64,
    pub engine: usize,
    pub number: u64,
    /// Output tokens so far.
    pub generated: usize,
    pub cached_tokens: usize,
    pub loaded_tokens: [usize; 2],
    pub finished: bool,
}

pub struct CacheEvent {
    pub at: f64,
    pub engine: usize,
    pub event: Event,
}

pub struct Fleet {
    engines: Vec<Engine>,
    /// End of each engine's running step.
    ends: Vec<Option<f64>>,
    /// Whether each engine may have work and runs no step.
    ready: Vec<bool>,
    pub now: f64,
    pub notices: Vec<Notice>,
    pub events: Vec<CacheEvent>,
    /// Seconds between the tokens of a request, over all requests.
    pub gaps: Vec<f32>,
    pub busy_seconds: Vec<f64>,
    pub steps: u64,
    pub preemptions: u64,
    /// Tokens that admitted requests found in the caches, including those that returned after a preemption.
    pub reused_tokens: u64,
}

impl Fleet {
    pub fn new(configs: Vec<Config>, record_events: bool) -> Self {
        let count = configs.len();
        let shared = Parts::default();
        Self {
            engines: configs.into_iter().map(|config| Engine::new(config, record_events, &shared)).collect(),
            ends: vec![None; count],
            ready: vec![false; count],
            now: 0.0,
            notices: Vec::new(),
            events: Vec::new(),
            gaps: Vec::new(),
            busy_seconds: vec![0.0; count],
            steps: 0,
            preemptions: 0,
            reused_tokens: 0,
        }
    }

    pub fn engine(&self, at: usize) -> Option<&Engine> {
        self.engines.get(at)
    }

    /// Submits a request to an engine now. It is part of the step that begins now, if one does.
    pub fn submit(&mut self, at: usize, request: Request) {
        self.engines[at].submit(request, self.now);
        self.ready[at] = self.ends[at].is_none();
    }

    /// Restarts an engine, which loses its cache and its requests.
    pub fn restart(&mut self, at: usize) {
        self.engines[at].restart();
        self.ends[at] = None;
        self.ready[at] = false;
    }

    /// Advances to `until`, or to the first moment before it at which a request gets its first token or ends. All steps
    /// that end at that moment have then ended and no further step has begun, so that requests submitted now are part
    /// of the next steps.
    pub fn advance(&mut self, until: f64) {
        while self.now < until {
            self.begin_steps();
            let next = self.ends.iter().flatten().copied().fold(f64::INFINITY, f64::min);
            if next > until {
                self.now = until;
                return;
            }
            self.now = next;
            if self.end_steps() {
                return;
            }
        }
    }

    fn begin_steps(&mut self) {
        for at in 0..self.engines.len() {
            if !self.ready[at] {
                continue;
            }
            self.ready[at] = false;
            let engine = &mut self.engines[at];
            let Some(step) = engine.begin_step(self.now) else { continue };
            self.ends[at] = Some(self.now + step.seconds);
            self.busy_seconds[at] += step.seconds;
            self.steps += 1;
            self.preemptions += step.preempted as u64;
            self.reused_tokens += step.reused_tokens as u64;
            let made = engine.events.drain(..).map(|event| CacheEvent { at: self.now, engine: at, event });
            self.events.extend(made);
        }
    }

    /// Ends the steps that end now. Returns whether anything happened that a router may act on.
    fn end_steps(&mut self) -> bool {
        let mut notable = false;
        for at in 0..self.engines.len() {
            if self.ends[at] != Some(self.now) {
                continue;
            }
            self.ends[at] = None;
            self.ready[at] = true;
            let block_size = self.engines[at].config.block_size;
            let (now, notices, gaps) = (self.now, &mut self.notices, &mut self.gaps);
            self.engines[at].end_step(now, |output| {
                let finished = output.finish != Finish::No;
                if !output.first {
                    gaps.push(output.gap as f32);
                }
                let acts = output.first || finished;
                notable |= acts;
                if acts || output.length % block_size == 1 || block_size == 1 {
                    notices.push(Notice {
                        at: now,
                        engine: at,
                        number: output.number,
                        generated: output.length - output.prompt_tokens,
                        cached_tokens: output.cached_tokens,
                        loaded_tokens: output.loaded_tokens,
                        finished,
                    });
                }
            });
        }
        notable
    }
}
