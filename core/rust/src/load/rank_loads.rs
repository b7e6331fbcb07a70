//! Load that the bookings of each rank put on it.

use std::collections::BTreeMap;
use std::sync::Arc;

/// (request_id, attempt, stage)
pub type Key = (String, i64, i64);

/// Load of one rank. Sums have 128 bits, so that no numbers of tokens exceed them.
#[derive(Default)]
pub struct Load {
    pub shared_blocks: u64,
    pub private_blocks: u128,
    pub prefill_tokens: u128,
    pub sequences: u64,
    /// Keys in the order in which they were booked.
    pub live: BTreeMap<u64, Arc<Key>>,
    /// Tokens of the prompts to compute, in the order in which they were booked: engines compute the oldest first.
    pub prompts: BTreeMap<u64, u64>,
    /// Seconds at which the oldest was booked, or at which a prompt before or beside it ended.
    since: f64,
    /// Most sequences between the last two calls of `most_sequences`, and since the last.
    pub peaks: (u64, u64),
}

impl Load {
    pub fn begin_prompt(&mut self, order: u64, tokens: u64, now: f64) {
        if self.prompts.is_empty() {
            self.since = now;
        }
        self.prompts.insert(order, tokens);
    }

    pub fn end_prompt(&mut self, order: u64, now: f64) {
        if self.prompts.remove(&order).is_some() {
            self.since = now;
        }
    }
}

/// The part of a load that `Sequences::loads` returns, in one cache line.
#[derive(Clone, Copy)]
pub struct Row {
    pub blocks: u128,
    pub prefill_tokens: i64,
    pub requests: i64,
    pub head_prefill_tokens: i64,
    pub prefill_requests: i64,
    pub head_prefill_since: f64,
}

impl From<&Load> for Row {
    fn from(load: &Load) -> Self {
        let head = load.prompts.first_key_value().map(|(_, tokens)| *tokens);
        Self {
            blocks: u128::from(load.shared_blocks) + load.private_blocks,
            prefill_tokens: word(load.prefill_tokens),
            requests: load.sequences as i64,
            head_prefill_tokens: word(u128::from(head.unwrap_or(0))),
            prefill_requests: load.prompts.len() as i64,
            head_prefill_since: if head.is_some() { load.since } else { f64::INFINITY },
        }
    }
}

/// The loads of all ranks by slot. Each has a row that is kept up to date, because a query reads those of thousands of ranks.
#[derive(Default)]
pub struct RankLoads {
    loads: Vec<Load>,
    rows: Vec<Row>,
}

impl RankLoads {
    pub fn len(&self) -> usize {
        self.loads.len()
    }

    /// Adds an empty load. Returns its slot.
    pub fn add(&mut self) -> u32 {
        self.rows.push(Row::from(&Load::default()));
        self.loads.push(Load::default());
        self.loads.len() as u32 - 1
    }

    pub fn get(&self, slot: u32) -> Option<&Load> {
        self.loads.get(slot as usize)
    }

    pub fn row(&self, slot: u32) -> Option<&Row> {
        self.rows.get(slot as usize)
    }

    /// Changes a load. Returns the result of the change; None if there is no such slot.
    pub fn change<T>(&mut self, slot: u32, change: impl FnOnce(&mut Load) -> T) -> Option<T> {
        let (load, row) = (self.loads.get_mut(slot as usize)?, self.rows.get_mut(slot as usize)?);
        let result = change(load);
        *row = Row::from(&*load);
        Some(result)
    }
}

/// Converts a sum to 64 bits, saturating.
pub fn word(sum: u128) -> i64 {
    i64::try_from(sum).unwrap_or(i64::MAX)
}
