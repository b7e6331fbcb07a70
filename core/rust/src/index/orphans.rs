//! Orphans: blocks of a rank whose ancestors are unknown. Dumps may contain them, because engines may evict parents
//! before children.
//!
//! Only the sequence hash of an orphan is known, so it cannot be in the tree. It is stored here until it is removed, or
//! until it is stored again below a known parent.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use crate::hash::sequence_hash;
use crate::index::Index;
use crate::index::store::{Chain, Refused};
use crate::index::tree::nodes::RankTier;
use crate::index::tree::ranks::{BlockPosition, Counting};
use crate::wire::TIERS;

/// An orphan block.
#[derive(Clone, Copy, Debug)]
pub struct OrphanBlock {
    pub sequence: u64,
    /// Sequence hash of its parent, if that is known.
    pub parent: Option<u64>,
    pub local: u64,
    pub depth: u32,
    /// Number of copies in each tier.
    pub copies: [u32; TIERS],
}

impl OrphanBlock {
    /// Returns the tiers (from 0) with copies.
    fn tiers(&self) -> impl Iterator<Item = u32> + use<> {
        (0u32..).zip(self.copies).filter(|(_, copies)| *copies > 0).map(|(tier, _)| tier)
    }
}

/// The orphan blocks of one rank.
#[derive(Default)]
pub struct Orphans {
    blocks: HashMap<u64, OrphanBlock>,
    /// Engine hashes by sequence hash.
    places: HashMap<u64, Vec<u64>>,
}

impl Orphans {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn get(&self, engine: u64) -> Option<&OrphanBlock> {
        self.blocks.get(&engine)
    }

    /// Returns the block of an engine hash for changes. At least one copy must be left.
    pub fn get_mut(&mut self, engine: u64) -> Option<&mut OrphanBlock> {
        self.blocks.get_mut(&engine)
    }

    /// Adds a block. There must be no block with this engine hash.
    pub fn add(&mut self, engine: u64, block: OrphanBlock) {
        self.places.entry(block.sequence).or_default().push(engine);
        self.blocks.insert(engine, block);
    }

    /// Removes and returns a block.
    pub fn take(&mut self, engine: u64) -> Option<OrphanBlock> {
        let block = self.blocks.remove(&engine)?;
        if let Some(engines) = self.places.get_mut(&block.sequence) {
            engines.retain(|at| *at != engine);
            if engines.is_empty() {
                self.places.remove(&block.sequence);
            }
        }
        Some(block)
    }

    /// Returns whether a place is resident in any of these tiers (from 0).
    pub fn holds(&self, sequence: u64, tiers: RangeInclusive<u32>) -> bool {
        self.places.get(&sequence).into_iter().flatten().any(|engine| {
            let held = |block: &OrphanBlock| {
                tiers.clone().any(|tier| block.copies.get(tier as usize).is_some_and(|some| *some > 0))
            };
            self.get(*engine).is_some_and(held)
        })
    }

    /// Returns all blocks, by engine hash.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &OrphanBlock)> {
        self.blocks.iter().map(|(engine, block)| (*engine, block))
    }

    /// Drops all copies in one tier, or in all. Returns the tier of each entry dropped.
    pub fn drop_tier(&mut self, tier: Option<u32>) -> Vec<u32> {
        let mut dropped = Vec::new();
        let mut gone = Vec::new();
        for (engine, block) in &mut self.blocks {
            for (at, copies) in (0u32..).zip(&mut block.copies) {
                if *copies > 0 && tier.is_none_or(|tier| tier == at) {
                    *copies = 0;
                    dropped.push(at);
                }
            }
            if block.copies == [0; TIERS] {
                gone.push(*engine);
            }
        }
        for engine in gone {
            self.take(engine);
        }
        dropped
    }

    pub fn heap(&self) -> usize {
        self.blocks.capacity() * (size_of::<OrphanBlock>() + 9) + self.places.capacity() * 41 + self.places.len() * 32
    }
}

impl Index {
    /// Removes an engine hash from the orphans of a rank that stores it at a known position. If the place is the same,
    /// its copies are kept.
    pub(crate) fn adopt_orphan(&mut self, rank_slot: u32, engine: u64, position: BlockPosition) {
        let Some(rank) = self.ranks.get_mut(rank_slot) else { return };
        if rank.orphans.is_empty() {
            return;
        }
        let Some(block) = rank.orphans.take(engine) else { return };
        self.count_orphan(rank_slot, block.tiers(), -1);
        if block.depth != position.depth || self.sequence_at(position.node, position.depth) != block.sequence {
            return;
        }
        // Stores each copy again at its place, which is now in the tree.
        let single = [engine];
        let hashes = [self.secret.mix(engine)];
        for (tier, copies) in (0u32..).zip(block.copies).filter(|(_, copies)| *copies > 0) {
            let rank_tier = RankTier::new(rank_slot, tier);
            let chain =
                Chain { rank_tier, counting: Counting::Set, engines: &single, locals: &[block.local], hashes: &hashes };
            if self.cover(&chain, position.node, position.depth, 0, 1).is_err() {
                return;
            }
            if let Some(resident) = self.locate(rank_slot, engine, self.secret.mix(engine)) {
                self.set_copies(rank_tier, resident, copies);
            }
        }
    }

    /// Stores a chain below an orphan block.
    pub(crate) fn store_below_orphan(
        &mut self,
        rank_tier: RankTier,
        counting: Counting,
        parent: u64,
        engines: &[u64],
        locals: &[u64],
    ) -> Result<(), Refused> {
        let Some(rank) = self.ranks.get(rank_tier.rank()) else { return Err(Refused::UnknownParent) };
        let Some(above) = rank.orphans.get(parent).copied() else { return Err(Refused::UnknownParent) };
        let count = u32::try_from(engines.len()).map_err(|_| Refused::Exhausted)?;
        if above.depth.checked_add(count).is_none() {
            return Err(Refused::Malformed("its chain is deeper than 2^32 blocks"));
        }
        let (mut depth, mut sequence) = (above.depth, above.sequence);
        for (&engine, &local) in engines.iter().zip(locals) {
            let before = sequence;
            (depth, sequence) = (depth + 1, sequence_hash(depth + 1, sequence, local));
            let block = OrphanBlock { sequence, parent: Some(before), local, depth, copies: [0; TIERS] };
            self.add_orphan(rank_tier, counting, engine, block);
        }
        self.compact();
        Ok(())
    }

    /// Adds a copy of an orphan block in a tier. If the rank has the engine hash at another place, it moves.
    pub(crate) fn add_orphan(&mut self, rank_tier: RankTier, counting: Counting, engine: u64, block: OrphanBlock) {
        let rank = rank_tier.rank();
        let hash = self.secret.mix(engine);
        let mut block = block;
        if let Some(resident) = self.locate(rank, engine, hash) {
            if resident.depth == block.depth && self.sequence_at(resident.node, resident.depth) == block.sequence {
                self.add_resident(
                    rank_tier,
                    resident.node,
                    resident.alias,
                    resident.depth,
                    resident.depth + 1,
                    counting,
                );
                return;
            }
            self.release_everywhere(rank, resident);
        }
        if let Some(old) = self.ranks.get_mut(rank).and_then(|rank| rank.orphans.take(engine)) {
            self.count_orphan(rank, old.tiers(), -1);
            if (old.sequence, old.depth) == (block.sequence, block.depth) {
                block.copies = old.copies;
                block.parent = block.parent.or(old.parent);
            }
        }
        if let Some(copies) = block.copies.get_mut(rank_tier.tier() as usize) {
            *copies = if counting == Counting::Set { 1 } else { copies.saturating_add(1) };
        }
        self.count_orphan(rank, block.tiers(), 1);
        if let Some(rank) = self.ranks.get_mut(rank) {
            rank.orphans.add(engine, block);
        }
    }

    /// Adds entries of orphans, by their tiers, to the index's counts, or subtracts them.
    pub(crate) fn count_orphan(&mut self, rank: u32, tiers: impl IntoIterator<Item = u32>, change: i64) {
        for tier in tiers {
            self.count_entries(RankTier::new(rank, tier), change);
            self.orphan_entries = self.orphan_entries.wrapping_add_signed(change);
        }
    }

    /// Removes a copy of an orphan (with `Set` counting: all copies). Returns whether there was one.
    pub(crate) fn remove_orphan(&mut self, rank_tier: RankTier, counting: Counting, engine: u64) -> bool {
        let Some(rank) = self.ranks.get_mut(rank_tier.rank()) else { return false };
        if rank.orphans.is_empty() {
            return false;
        }
        let Some(block) = rank.orphans.get_mut(engine) else { return false };
        let Some(copies) = block.copies.get_mut(rank_tier.tier() as usize).filter(|copies| **copies > 0) else {
            return false;
        };
        *copies = if counting == Counting::Set { 0 } else { *copies - 1 };
        if *copies == 0 {
            if block.copies == [0; TIERS] {
                rank.orphans.take(engine);
            }
            self.count_orphan(rank_tier.rank(), [rank_tier.tier()], -1);
        }
        true
    }
}
