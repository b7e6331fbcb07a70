//! Outputs, cache events and load of an engine, as in `kvrouter.mocker.engine.types`.

use crate::sequence::Sequence;

/// Where a block is cached; the values are those of the enum Tier of the contract.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Device = 1,
    Host = 2,
    Shared = 4,
}

pub enum Event {
    Stored {
        parent: Option<u64>,
        hashes: Vec<u64>,
        /// Little-endian u32.
        tokens: Vec<u8>,
        root: u64,
        tier: Tier,
    },
    /// One physical copy of each.
    Removed {
        hashes: Vec<u64>,
        tier: Tier,
    },
    Cleared,
}

impl Event {
    /// Blocks `start` to `stop` of a sequence, each with `width` bytes of tokens, became cached.
    pub fn stored(sequence: &Sequence, start: usize, stop: usize, width: usize, tier: Tier) -> Self {
        Self::Stored {
            parent: (start > 0).then(|| sequence.chain[start]),
            hashes: sequence.chain[start + 1..=stop].to_vec(),
            tokens: sequence.tokens[start * width..stop * width].to_vec(),
            root: sequence.root,
            tier,
        }
    }
}

pub struct Step {
    pub seconds: f64,
    pub prefill_tokens: usize,
    pub reused_tokens: usize,
    pub decode_sequences: usize,
    pub preempted: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    No,
    Length,
    Stop,
}

/// Output of one request in a step.
pub struct Output {
    pub number: u64,
    pub token: u32,
    pub finish: Finish,
    pub first: bool,
    /// Seconds since its previous token; 0 for the first.
    pub gap: f64,
    pub prompt_tokens: usize,
    /// Prompt and output.
    pub length: usize,
    pub cached_tokens: usize,
    /// Those loaded from host memory and from shared storage.
    pub loaded_tokens: [usize; 2],
    pub submitted_at: f64,
    pub scheduled_at: f64,
}

pub struct Load {
    pub running: usize,
    pub waiting: usize,
    pub active_blocks: usize,
    pub cached_blocks: usize,
    pub prefill_tokens: usize,
}
