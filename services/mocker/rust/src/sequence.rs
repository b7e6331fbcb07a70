//! A request in the engine: its known tokens, how many of them are computed, and its blocks.

use crate::config::Config;
use crate::pool::engine_hash;

/// A request as the driver submits it.
pub struct Request {
    /// The driver's number of the request.
    pub number: u64,
    /// Tokens, little-endian u32.
    pub prompt: Vec<u8>,
    pub max_tokens: usize,
    /// Whether the blocks of its prompt arrive from a prefill worker.
    pub received: bool,
    /// Parent hash of its first block.
    pub root: u64,
    /// Initial state of the generator of its output tokens.
    pub stream: u64,
    pub stop: Vec<u32>,
    /// Output tokens before which no stop token ends the request.
    pub min_tokens: usize,
    /// Output tokens after which it ends with `stop`.
    pub ends_after: Option<usize>,
    /// The whole output, if it is not drawn.
    pub output: Vec<u32>,
}

pub struct Sequence {
    pub number: u64,
    /// The prompt and all output, little-endian u32.
    pub tokens: Vec<u8>,
    /// Number of these tokens.
    pub length: usize,
    pub prompt_tokens: usize,
    pub limit: usize,
    /// Whether the blocks of its prompt have arrived and are not admitted yet.
    pub received: bool,
    pub root: u64,
    stop: Vec<u32>,
    /// Length before which no stop token ends the sequence.
    stops_from: usize,
    /// Length at which it ends with `stop`.
    ends_at: usize,
    output: Vec<u32>,
    pub submitted_at: f64,
    pub scheduled_at: Option<f64>,
    pub last_output_at: f64,
    pub cached_tokens: usize,
    /// Those loaded from host memory and from shared storage.
    pub loaded_tokens: [usize; 2],
    pub computed: usize,
    /// Number of its blocks, own or shared; the first `pages.len()` of them are cached.
    pub held: usize,
    /// Tokens that fit into its blocks.
    pub room: usize,
    pub pages: Vec<u32>,
    /// chain[i] is the parent hash of block i, chain[i + 1] its own, for every full block of `tokens`.
    pub chain: Vec<u64>,
    stream: u64,
}

impl Sequence {
    pub fn new(request: Request, config: &Config, submitted_at: f64) -> Self {
        let prompt_tokens = request.prompt.len() / 4;
        Self {
            number: request.number,
            tokens: request.prompt,
            length: prompt_tokens,
            prompt_tokens,
            limit: config.length_limit.min(prompt_tokens.saturating_add(request.max_tokens)),
            received: request.received,
            root: request.root,
            stop: request.stop,
            stops_from: prompt_tokens.saturating_add(request.min_tokens),
            ends_at: request.ends_after.map_or(usize::MAX, |tokens| prompt_tokens.saturating_add(tokens)),
            output: request.output,
            submitted_at,
            scheduled_at: None,
            last_output_at: submitted_at,
            cached_tokens: 0,
            loaded_tokens: [0, 0],
            computed: 0,
            held: 0,
            room: 0,
            pages: Vec::new(),
            chain: Vec::new(),
            stream: request.stream,
        }
    }

    /// Hashes the blocks of the prompt, if not done yet. This waits until the sequence is first in the queue.
    pub fn cut(&mut self, config: &Config) {
        if !self.chain.is_empty() {
            return;
        }
        let mut parent = self.root;
        self.chain.reserve(self.length / config.block_size + 1);
        self.chain.push(parent);
        for block in self.tokens.chunks_exact(4 * config.block_size) {
            parent = engine_hash(parent, block);
            self.chain.push(parent);
        }
    }

    /// Returns whether the output ends with this token, which is its newest.
    pub fn stops_with(&self, token: u32) -> bool {
        self.length >= self.ends_at || (self.length >= self.stops_from && self.stop.contains(&token))
    }

    /// Adds the next output token, drawn unless the output is given: the high half of a linear congruential generator (Knuth's MMIX).
    pub fn generate(&mut self, config: &Config) -> u32 {
        self.stream = self.stream.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let drawn = (((self.stream >> 32) * config.vocabulary_size) >> 32) as u32;
        let token = self.output.get(self.length - self.prompt_tokens).copied().unwrap_or(drawn);
        self.tokens.extend_from_slice(&token.to_le_bytes());
        self.length += 1;
        if self.length.is_multiple_of(config.block_size) {
            let block = &self.tokens[self.tokens.len() - 4 * config.block_size..];
            let parent = self.chain[self.chain.len() - 1];
            self.chain.push(engine_hash(parent, block));
        }
        token
    }
}
