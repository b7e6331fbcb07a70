//! Configuration of one engine and the time of its steps, as in `kvrouter.mocker.engine.config` and `time_model`.

#[derive(Clone, Copy)]
pub struct TimeModel {
    pub prefill_n2_ms: f64,
    pub prefill_n1_ms: f64,
    pub prefill_n0_ms: f64,
    pub decode_p2_ms: f64,
    pub decode_p1_ms: f64,
    pub decode_p0_ms: f64,
    pub decode_floor_ms: f64,
}

impl TimeModel {
    /// Returns the seconds at speed 1. The order of operations is that of the reference, so that times are equal.
    pub fn step_seconds(&self, prefill_tokens: u64, decode_tokens: u64, capacity_tokens: u64) -> f64 {
        let mut ms = 0.0;
        if prefill_tokens > 0 {
            let n = prefill_tokens as f64;
            ms += (self.prefill_n2_ms * n + self.prefill_n1_ms) * n + self.prefill_n0_ms;
        }
        if decode_tokens > 0 {
            let share = (decode_tokens as f64 / capacity_tokens as f64).min(1.0);
            let curve = (self.decode_p2_ms * share + self.decode_p1_ms) * share + self.decode_p0_ms;
            ms += if curve > self.decode_floor_ms { curve } else { self.decode_floor_ms };
        }
        ms / 1e3
    }
}

/// A tier below device memory.
#[derive(Clone, Copy)]
pub struct TierConfig {
    /// 0 for no such tier.
    pub num_blocks: usize,
    /// Seconds of a load besides those of its blocks.
    pub latency_s: f64,
    pub block_s: f64,
}

#[derive(Clone, Copy)]
pub struct Config {
    pub num_blocks: usize,
    pub block_size: usize,
    pub max_batched_tokens: usize,
    pub max_sequences: usize,
    pub length_limit: usize,
    pub prefix_caching: bool,
    pub speed: f64,
    pub vocabulary_size: u64,
    pub time_model: TimeModel,
    /// Host memory and shared storage.
    pub tiers: [TierConfig; 2],
}

impl Config {
    pub fn capacity_tokens(&self) -> u64 {
        (self.num_blocks * self.block_size) as u64
    }

    /// Returns the number of blocks for so many tokens; the last one may be partial.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }
}
