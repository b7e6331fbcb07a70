//! One rank: its scheduler and its KV cache. `kvrouter.mocker.engine.reference` documents the rules of a step. The
//! order of operations is the same there and here, so that outputs, events and times are equal.

use std::collections::{HashMap, VecDeque};

use crate::config::Config;
use crate::offloading::{OffloadTier, Parts};
use crate::pool::{Pool, Row};
use crate::sequence::{Request, Sequence};
use crate::types::{Event, Finish, Load, Output, Step, Tier};

type Handle = usize;

pub struct Engine {
    pub config: Config,
    pub events: Vec<Event>,
    record_events: bool,
    pool: Pool,
    /// Host memory and shared storage, if there is any.
    tiers: Vec<OffloadTier>,
    /// Seconds of the loads of the step.
    loading: f64,
    sequences: Vec<Option<Sequence>>,
    unused: Vec<Handle>,
    by_number: HashMap<u64, Handle>,
    waiting: VecDeque<Handle>,
    /// In order of admission.
    decoding: Vec<Handle>,
    /// Admitted after all that decode or complete.
    prefilling: Option<Handle>,
    /// Their prefill ends with the running step.
    completing: Vec<Handle>,
    in_step: bool,
    clear: bool,
}

impl Engine {
    /// `shared` is the shared storage.
    pub fn new(config: Config, record_events: bool, shared: &Parts) -> Self {
        let tiers = if config.tiers.iter().all(|tier| tier.num_blocks == 0) {
            Vec::new()
        } else {
            let [host, pooled] = config.tiers;
            vec![
                OffloadTier::new(Tier::Host, host.num_blocks, config.block_size, Parts::default()),
                OffloadTier::new(Tier::Shared, pooled.num_blocks, config.block_size, shared.clone()),
            ]
        };
        Self {
            config,
            events: Vec::new(),
            record_events,
            pool: Pool::new(config.num_blocks, config.block_size),
            tiers,
            loading: 0.0,
            sequences: Vec::new(),
            unused: Vec::new(),
            by_number: HashMap::new(),
            waiting: VecDeque::new(),
            decoding: Vec::new(),
            prefilling: None,
            completing: Vec::new(),
            in_step: false,
            clear: false,
        }
    }

    pub fn in_step(&self) -> bool {
        self.in_step
    }

    pub fn holds(&self, number: u64) -> bool {
        self.by_number.contains_key(&number)
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Puts a request into the queue. The driver has checked its length, its number and the queue's limit.
    pub fn submit(&mut self, request: Request, now: f64) {
        let sequence = Sequence::new(request, &self.config, now);
        let number = sequence.number;
        let handle = match self.unused.pop() {
            Some(handle) => {
                self.sequences[handle] = Some(sequence);
                handle
            }
            None => {
                self.sequences.push(Some(sequence));
                self.sequences.len() - 1
            }
        };
        self.by_number.insert(number, handle);
        self.waiting.push_back(handle);
    }

    /// Schedules a step; returns None if there is nothing to do. No step may be running.
    pub fn begin_step(&mut self, now: f64) -> Option<Step> {
        let cleared = self.clear;
        if cleared {
            self.forget();
        }
        if self.by_number.is_empty() && !cleared {
            return None;
        }
        self.loading = 0.0;
        let queued = self.waiting.len();
        let decode_sequences = self.schedule_decodes();
        let mut budget = self.config.max_batched_tokens - decode_sequences;
        let mut prefill_tokens = self.continue_prefill(budget);
        let preempted = self.waiting.len() - queued;
        let (mut reused_tokens, mut received_tokens) = (0, 0);
        if preempted == 0 {
            budget -= prefill_tokens;
            let (admitted, reused, received) = self.admit(budget, now);
            prefill_tokens += admitted;
            reused_tokens = reused;
            received_tokens = received;
        }
        let decode_tokens: usize = self.decoding.iter().map(|handle| self.get(*handle).length).sum();
        let seconds = self.config.time_model.step_seconds(
            prefill_tokens as u64,
            (decode_tokens + received_tokens) as u64,
            self.config.capacity_tokens(),
        );
        self.in_step = true;
        let computing = seconds / self.config.speed;
        let seconds = if self.loading > computing { self.loading } else { computing };
        Some(Step { seconds, prefill_tokens, reused_tokens, decode_sequences, preempted })
    }

    /// Ends the running step; appends its output for each request to `outputs`, oldest request first.
    pub fn end_step(&mut self, now: f64, mut output: impl FnMut(Output)) {
        self.in_step = false;
        let mut ended = Vec::new();
        self.decoding.append(&mut self.completing);
        for at in 0..self.decoding.len() {
            let handle = self.decoding[at];
            let Some(sequence) = self.sequences[handle].as_mut() else { continue };
            let token = sequence.generate(&self.config);
            let length = sequence.length;
            let first = length == sequence.prompt_tokens + 1;
            let gap = if first { 0.0 } else { now - sequence.last_output_at };
            sequence.last_output_at = now;
            let finish = if sequence.stops_with(token) {
                Finish::Stop
            } else if length >= sequence.limit {
                Finish::Length
            } else {
                Finish::No
            };
            output(Output {
                number: sequence.number,
                token,
                finish,
                first,
                gap,
                prompt_tokens: sequence.prompt_tokens,
                length,
                cached_tokens: sequence.cached_tokens,
                loaded_tokens: sequence.loaded_tokens,
                submitted_at: sequence.submitted_at,
                scheduled_at: sequence.scheduled_at.unwrap_or(sequence.submitted_at),
            });
            if finish != Finish::No {
                ended.push(handle);
                self.end(handle);
            }
        }
        if !ended.is_empty() {
            let sequences = &self.sequences;
            self.decoding.retain(|handle| sequences[*handle].is_some());
            // Handles may be reused only once no list contains them.
            self.unused.append(&mut ended);
        }
    }

    /// Ends a request at once. Returns (cached tokens, submitted, scheduled, tokens loaded from host memory and from
    /// shared storage); None if it is unknown.
    pub fn abort(&mut self, number: u64) -> Option<(usize, f64, f64, usize, usize)> {
        let handle = *self.by_number.get(&number)?;
        if self.prefilling == Some(handle) {
            self.prefilling = None;
        }
        self.decoding.retain(|other| *other != handle);
        self.completing.retain(|other| *other != handle);
        self.waiting.retain(|other| *other != handle);
        let sequence = self.end(handle)?;
        self.unused.push(handle);
        let scheduled_at = sequence.scheduled_at.unwrap_or(sequence.submitted_at);
        let [host, shared] = sequence.loaded_tokens;
        Some((sequence.cached_tokens, sequence.submitted_at, scheduled_at, host, shared))
    }

    /// Empties the cache in the next step.
    pub fn clear_cache(&mut self) {
        self.clear = true;
    }

    pub fn load(&self) -> Load {
        let waiting = self.waiting.iter().map(|handle| self.get(*handle));
        let mut prefill_tokens: usize =
            waiting.filter(|sequence| !sequence.received).map(|sequence| sequence.length).sum();
        if let Some(handle) = self.prefilling {
            prefill_tokens += self.get(handle).length - self.get(handle).computed;
        }
        Load {
            running: self.by_number.len() - self.waiting.len(),
            waiting: self.waiting.len(),
            active_blocks: self.pool.active(),
            cached_blocks: self.pool.idle(),
            prefill_tokens,
        }
    }

    pub fn table(&self) -> impl Iterator<Item = Row<'_>> {
        self.pool.table()
    }

    #[allow(clippy::expect_used)] // lists contain existing sequences only
    fn get(&self, handle: Handle) -> &Sequence {
        self.sequences[handle].as_ref().expect("the sequence lives")
    }

    #[allow(clippy::expect_used)]
    fn get_mut(&mut self, handle: Handle) -> &mut Sequence {
        self.sequences[handle].as_mut().expect("the sequence lives")
    }

    /// Makes room for one token of each decoding sequence; returns how many decode.
    fn schedule_decodes(&mut self) -> usize {
        let mut at = 0;
        while at < self.decoding.len() {
            let handle = self.decoding[at];
            let sequence = self.get(handle);
            let (length, room) = (sequence.length, sequence.room);
            if length > room {
                while self.pool.free() == 0 {
                    if self.preempt_newest() == Some(handle) {
                        return self.decoding.len();
                    }
                }
                self.take(handle, 1);
            }
            if length >= room && self.config.prefix_caching && length == self.get(handle).room {
                self.store(handle, length);
            }
            self.get_mut(handle).computed = length;
            at += 1;
        }
        self.decoding.len()
    }

    /// Schedules the next chunk of the unfinished prefill; returns its tokens.
    fn continue_prefill(&mut self, budget: usize) -> usize {
        let Some(handle) = self.prefilling else { return 0 };
        if budget == 0 {
            return 0;
        }
        let sequence = self.get(handle);
        let chunk = budget.min(sequence.length - sequence.computed);
        if self.config.blocks_for(sequence.computed + chunk) - sequence.held > self.pool.free() {
            self.preempt_newest();
            return 0;
        }
        self.prefilling = None;
        self.compute(handle, chunk);
        chunk
    }

    /// Admits waiting requests and schedules their first chunks; returns tokens scheduled, tokens reused, and tokens of
    /// prompts whose blocks have arrived.
    fn admit(&mut self, mut budget: usize, now: f64) -> (usize, usize, usize) {
        let (mut scheduled, mut reused, mut received_tokens) = (0, 0, 0);
        let mut running = self.by_number.len() - self.waiting.len();
        while scheduled < budget && running < self.config.max_sequences {
            let Some(&handle) = self.waiting.front() else { break };
            let config = self.config;
            let Some(sequence) = self.sequences[handle].as_mut() else { break };
            sequence.cut(&config);
            let length = sequence.length;
            let limit = if config.prefix_caching { (length - 1) / config.block_size } else { 0 };
            let hits = self.pool.find(&sequence.chain, &sequence.tokens, limit);
            let in_use = hits.iter().filter(|page| self.pool.uses(**page) > 0).count();
            if config.blocks_for(length) - in_use > self.pool.free() {
                break;
            }
            self.waiting.pop_front();
            running += 1;
            self.pool.hold(&hits);
            sequence.held = hits.len();
            sequence.computed = hits.len() * config.block_size;
            sequence.room = sequence.computed;
            sequence.pages = hits;
            let loaded = if self.tiers.is_empty() { [0, 0] } else { self.load_blocks(handle) };
            let sequence = self.get_mut(handle);
            reused += sequence.computed;
            if sequence.scheduled_at.is_none() {
                sequence.scheduled_at = Some(now);
                sequence.cached_tokens = sequence.computed;
                sequence.loaded_tokens = loaded;
            }
            let missing = length - sequence.computed;
            if std::mem::take(&mut sequence.received) {
                budget -= 1;
                received_tokens += length;
                self.compute(handle, missing);
                continue;
            }
            let chunk = (budget - scheduled).min(missing);
            self.compute(handle, chunk);
            scheduled += chunk;
        }
        (scheduled, reused, received_tokens)
    }

    /// Loads the blocks that follow those on the device; returns their tokens by tier.
    fn load_blocks(&mut self, handle: Handle) -> [usize; 2] {
        let size = self.config.block_size;
        let Some(sequence) = self.sequences[handle].as_ref() else { return [0, 0] };
        let held = sequence.pages.len();
        let mut counts = [0, 0];
        if !sequence.received && self.config.prefix_caching {
            for block in held..(sequence.length - 1) / size {
                match self.tiers.iter().position(|tier| tier.has(sequence, block)) {
                    Some(place) => counts[place] += 1,
                    None => break,
                }
            }
        }
        self.keep(handle, 0, held);
        let loaded: usize = counts.iter().sum();
        if loaded > 0 {
            self.take(handle, loaded);
            self.store(handle, (held + loaded) * size);
            let sequence = self.get_mut(handle);
            sequence.computed = sequence.room;
        }
        for (count, tier) in counts.iter().zip(self.config.tiers) {
            if *count > 0 {
                self.loading += tier.latency_s + *count as f64 * tier.block_s;
            }
        }
        counts.map(|count| count * size)
    }

    /// Copies blocks of a sequence to the tiers.
    fn keep(&mut self, handle: Handle, start: usize, stop: usize) {
        let Some(sequence) = self.sequences[handle].as_ref() else { return };
        for tier in &mut self.tiers {
            tier.keep(sequence, start, stop, |event| {
                if self.record_events {
                    self.events.push(event);
                }
            });
        }
    }

    /// Schedules `chunk` more tokens of a prefill, for which there are enough blocks.
    fn compute(&mut self, handle: Handle, chunk: usize) {
        let sequence = self.get(handle);
        let computed = sequence.computed + chunk;
        let complete = computed == sequence.length;
        let more = self.config.blocks_for(computed) - sequence.held;
        self.take(handle, more);
        if self.config.prefix_caching {
            self.store(handle, computed);
        }
        self.get_mut(handle).computed = computed;
        if complete {
            self.completing.push(handle);
        } else {
            self.prefilling = Some(handle);
        }
    }

    fn take(&mut self, handle: Handle, count: usize) {
        let mut evicted = Vec::new();
        self.pool.take(count, &mut evicted);
        if self.record_events && !evicted.is_empty() {
            self.events.push(Event::Removed { hashes: evicted, tier: Tier::Device });
        }
        let block_size = self.config.block_size;
        let sequence = self.get_mut(handle);
        sequence.held += count;
        sequence.room += count * block_size;
    }

    /// Makes the blocks cached that are full once `computed` tokens are computed.
    fn store(&mut self, handle: Handle, computed: usize) {
        let width = 4 * self.config.block_size;
        let Some(sequence) = self.sequences[handle].as_mut() else { return };
        let (start, stop) = (sequence.pages.len(), computed / self.config.block_size);
        if start == stop {
            return;
        }
        for block in start..stop {
            let content = &sequence.tokens[block * width..(block + 1) * width];
            let (parent, hash) = (sequence.chain[block], sequence.chain[block + 1]);
            sequence.pages.push(self.pool.store(parent, hash, content, sequence.root, block == 0));
        }
        if self.record_events {
            self.events.push(Event::stored(sequence, start, stop, width, Tier::Device));
        }
        self.keep(handle, start, stop);
    }

    /// Returns the sequence that was admitted last to the head of the queue.
    fn preempt_newest(&mut self) -> Option<Handle> {
        let handle = self.prefilling.take().or_else(|| self.decoding.pop())?;
        self.release(handle);
        self.waiting.push_front(handle);
        Some(handle)
    }

    fn release(&mut self, handle: Handle) {
        let Some(sequence) = self.sequences[handle].as_mut() else { return };
        self.pool.release(&sequence.pages, sequence.held - sequence.pages.len());
        sequence.pages.clear();
        (sequence.held, sequence.room, sequence.computed) = (0, 0, 0);
    }

    /// Releases and removes a sequence. Its handle may be reused only once no list contains it.
    fn end(&mut self, handle: Handle) -> Option<Sequence> {
        self.release(handle);
        let sequence = self.sequences[handle].take()?;
        self.by_number.remove(&sequence.number);
        Some(sequence)
    }

    fn forget(&mut self) {
        while self.preempt_newest().is_some() {}
        self.pool.clear();
        self.empty_tiers();
        self.clear = false;
        if self.record_events {
            self.events.push(Event::Cleared);
        }
    }

    /// Loses the cache and the requests. What it has stored in its tiers is gone for other engines, too.
    pub fn restart(&mut self) {
        self.empty_tiers();
        let tiers = std::mem::take(&mut self.tiers);
        *self = Self { tiers, ..Self::new(self.config, self.record_events, &Parts::default()) };
    }

    fn empty_tiers(&mut self) {
        for tier in &mut self.tiers {
            tier.clear();
        }
    }
}
