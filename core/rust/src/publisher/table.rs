//! The blocks of a rank with their copies and digest, and changes of them that can be undone.

use std::collections::hash_map::Entry;

use super::blocks::Block;
use crate::hash::{ByEngineHash, digest_term};
use crate::wire::TIERS;

struct Undo {
    digest: u64,
    copies: [u64; TIERS],
    /// The blocks before their first change; None for those that were not resident.
    blocks: ByEngineHash<Option<Block>>,
}

/// Resident blocks by engine hash.
pub struct BlockTable {
    /// Sum of the digest terms of all blocks, as KvEventBatch.digest defines it.
    pub digest: u64,
    /// Physical copies of all blocks by tier.
    pub copies: [u64; TIERS],
    /// Whether each copy is stored and removed by itself.
    counted: bool,
    blocks: ByEngineHash<Block>,
    undo: Option<Undo>,
}

impl BlockTable {
    pub fn new(counted: bool) -> Self {
        Self { digest: 0, copies: [0; TIERS], counted, blocks: ByEngineHash::default(), undo: None }
    }

    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Makes room for more blocks.
    pub fn reserve(&mut self, blocks: usize) {
        self.blocks.reserve(blocks);
    }

    pub fn get(&self, engine_hash: u64) -> Option<&Block> {
        self.blocks.get(&engine_hash)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Block)> {
        self.blocks.iter().map(|(engine_hash, block)| (*engine_hash, block))
    }

    /// Adds a copy of a block to a tier. A block that is at another place moves there with this copy alone.
    pub fn store(&mut self, engine_hash: u64, block: Block, index: usize) {
        let counted = self.counted;
        match self.blocks.get(&engine_hash) {
            Some(resident) if resident.sequence == block.sequence => {
                self.change_copies(engine_hash, index, |copies| if counted { copies.saturating_add(1) } else { 1 });
            }
            Some(_) => {
                for tier in 0..TIERS {
                    self.change_copies(engine_hash, tier, |_| 0);
                }
                self.add(engine_hash, block);
            }
            None => self.add(engine_hash, block),
        }
    }

    /// Adds a block that is not resident, with all its copies.
    pub fn add(&mut self, engine_hash: u64, block: Block) {
        for (index, copies) in block.copies.into_iter().enumerate() {
            if let Some(total) = self.copies.get_mut(index) {
                *total += u64::from(copies);
            }
            self.digest = self.digest.wrapping_add(term(engine_hash, &block, index, copies));
        }
        self.put(engine_hash, Some(block));
    }

    /// Removes a copy, or all if they are not counted, from a tier. Returns whether there was one.
    pub fn remove(&mut self, engine_hash: u64, index: usize) -> bool {
        let resident = self.get(engine_hash).and_then(|block| block.copies.get(index));
        if resident.is_none_or(|copies| *copies == 0) {
            return false;
        }
        let counted = self.counted;
        self.change_copies(engine_hash, index, |copies| if counted { copies - 1 } else { 0 });
        true
    }

    /// Removes all blocks from a tier.
    pub fn clear(&mut self, index: usize) {
        for engine_hash in self.blocks.keys().copied().collect::<Vec<_>>() {
            self.change_copies(engine_hash, index, |_| 0);
        }
    }

    /// Removes all blocks.
    pub fn clear_all(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        if let Some(undo) = &mut self.undo {
            for (engine_hash, block) in blocks {
                undo.blocks.entry(engine_hash).or_insert(Some(block));
            }
        }
        self.copies = [0; TIERS];
        self.digest = 0;
    }

    /// Replaces what is recorded of a resident block, except for its copies and its place.
    pub fn replace(&mut self, engine_hash: u64, block: Block) {
        self.put(engine_hash, Some(block));
    }

    /// Begins changes that `roll_back` can undo.
    pub fn begin(&mut self) {
        self.undo = Some(Undo { digest: self.digest, copies: self.copies, blocks: ByEngineHash::default() });
    }

    /// Ends changes, which stay.
    pub fn commit(&mut self) {
        self.undo = None;
    }

    /// Undoes all changes since `begin`.
    pub fn roll_back(&mut self) {
        let Some(undo) = self.undo.take() else { return };
        (self.digest, self.copies) = (undo.digest, undo.copies);
        for (engine_hash, block) in undo.blocks {
            self.put(engine_hash, block);
        }
    }

    fn put(&mut self, engine_hash: u64, block: Option<Block>) {
        let before = match block {
            Some(block) => self.blocks.insert(engine_hash, block),
            None => self.blocks.remove(&engine_hash),
        };
        if let Some(undo) = &mut self.undo {
            undo.blocks.entry(engine_hash).or_insert(before);
        }
    }

    /// Changes the number of copies in a tier. A block without any copy is removed.
    fn change_copies(&mut self, engine_hash: u64, index: usize, change: impl FnOnce(u32) -> u32) {
        let Entry::Occupied(mut entry) = self.blocks.entry(engine_hash) else { return };
        let block = entry.get();
        let Some(before) = block.copies.get(index).copied() else { return };
        let after = change(before);
        if before == after {
            return;
        }
        if let Some(undo) = &mut self.undo {
            undo.blocks.entry(engine_hash).or_insert_with(|| Some(block.clone()));
        }
        self.digest = self.digest.wrapping_sub(term(engine_hash, block, index, before)).wrapping_add(term(
            engine_hash,
            block,
            index,
            after,
        ));
        if let Some(total) = self.copies.get_mut(index) {
            *total = *total - u64::from(before) + u64::from(after);
        }
        if let Some(copies) = entry.get_mut().copies.get_mut(index) {
            *copies = after;
        }
        if entry.get().copies == [0; TIERS] {
            entry.remove();
        }
    }
}

fn term(engine_hash: u64, block: &Block, index: usize, copies: u32) -> u64 {
    if copies == 0 { 0 } else { digest_term(engine_hash, block.sequence, index as u32 + 1, copies) }
}
