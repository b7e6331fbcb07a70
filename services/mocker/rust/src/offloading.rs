//! Tiers below device memory, as in `kvrouter.mocker.engine.offloading`.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::pool::Pool;
use crate::sequence::Sequence;
use crate::types::{Event, Tier};

/// The parts of a storage, one for each engine that fills it.
pub type Parts = Arc<Mutex<Vec<Pool>>>;

/// One tier of an engine.
pub struct OffloadTier {
    tier: Tier,
    block_size: usize,
    parts: Parts,
    own: usize,
}

impl OffloadTier {
    /// Adds a part of `num_blocks` blocks to a storage.
    pub fn new(tier: Tier, num_blocks: usize, block_size: usize, parts: Parts) -> Self {
        let mut pools = lock(&parts);
        pools.push(Pool::new(num_blocks, block_size));
        let own = pools.len() - 1;
        drop(pools);
        Self { tier, block_size, parts, own }
    }

    /// Returns whether the engine can load a block of a sequence.
    pub fn has(&self, sequence: &Sequence, block: usize) -> bool {
        find(&lock(&self.parts), sequence, block, 4 * self.block_size).is_some()
    }

    /// Copies blocks of a sequence to the tier, or uses them there once more.
    pub fn keep(&mut self, sequence: &Sequence, start: usize, stop: usize, mut record: impl FnMut(Event)) {
        let width = 4 * self.block_size;
        let mut pools = lock(&self.parts);
        let mut used = Vec::new();
        let mut missing = Vec::new();
        for block in start..stop {
            match find(&pools, sequence, block, width) {
                Some((at, page)) => {
                    pools[at].hold(&[page]);
                    used.push((at, page));
                }
                None => missing.push(block),
            }
        }
        let own = &mut pools[self.own];
        missing.truncate(own.free());
        let mut evicted = Vec::new();
        own.take(missing.len(), &mut evicted);
        if !evicted.is_empty() {
            record(Event::Removed { hashes: evicted, tier: self.tier });
        }
        for &block in &missing {
            let content = &sequence.tokens[block * width..(block + 1) * width];
            let (parent, hash) = (sequence.chain[block], sequence.chain[block + 1]);
            used.push((self.own, own.store(parent, hash, content, sequence.root, block == 0)));
        }
        for run in missing.chunk_by(|one, next| one + 1 == *next) {
            record(Event::stored(sequence, run[0], run[run.len() - 1] + 1, width, self.tier));
        }
        for (at, page) in used.into_iter().rev() {
            pools[at].release(&[page], 0);
        }
    }

    /// Drops the blocks that the engine has stored.
    pub fn clear(&mut self) {
        lock(&self.parts)[self.own].clear();
    }
}

fn lock(parts: &Parts) -> MutexGuard<'_, Vec<Pool>> {
    parts.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(pools: &[Pool], sequence: &Sequence, block: usize, width: usize) -> Option<(usize, u32)> {
    let (chain, content) = (&sequence.chain[block..block + 2], &sequence.tokens[block * width..(block + 1) * width]);
    pools.iter().enumerate().find_map(|(at, pool)| pool.find(chain, content, 1).first().map(|page| (at, *page)))
}
