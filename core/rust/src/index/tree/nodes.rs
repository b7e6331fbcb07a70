//! The records of the tree: radix nodes, residency ranges and hash aliases.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::index::tree::blocks::{LANES, Slot, slot};

/// The node that every sequence starts from: it has no blocks.
pub const ROOT: u32 = 0;
/// Stands for the shared engine hashes of the node's own blocks, where an alias id is expected.
pub const SHARED: u32 = 0;
/// Maximum number of blocks of a node or an alias: the number of a chunk is a u16.
pub const MAX_BLOCKS: u32 = (1 << 16) * LANES;

/// A radix node: consecutive blocks, from any of which other nodes may branch off.
///
/// Depths are absolute, counted from the start of the sequence, so that a new branch changes nothing: nodes are never
/// split. A node begins where a rank first stored blocks that differ from all blocks of the index.
#[derive(Default)]
pub struct Node {
    /// The node it branches off, at its own `start`.
    pub parent: u32,
    /// Depth of its first block.
    pub start: u32,
    /// Number of its blocks, resident or not; 0 for a free record.
    pub len: u32,
    /// Number of nodes that branch off it.
    pub children: u32,
    /// Upper bound of the depths of its branches.
    pub deepest_branch: u32,
    /// Number of blocks removed at its end since the last scan for blocks without residents.
    pub dropped: u32,
    /// Ids of its chunks.
    pub chunks: Vec<u32>,
    /// Its residency ranges, in order of (rank, tier, alias).
    pub residency_ranges: Vec<ResidencyRange>,
    /// Sequence hash of the block before its first one; 0 until it is computed.
    prefix: AtomicU64,
}

impl Node {
    /// Creates a node without blocks.
    pub fn branch(parent: u32, start: u32) -> Self {
        Self { parent, start, deepest_branch: start, ..Self::default() }
    }

    /// Returns the depth after its last block.
    #[inline]
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// Returns the slot of the block at a depth; a slot outside all chunks if there is no such block.
    #[inline]
    pub fn slot(&self, depth: u32) -> Slot {
        let offset = depth.wrapping_sub(self.start);
        self.chunks.get((offset / LANES) as usize).map_or(u32::MAX, |&chunk| slot(chunk, offset % LANES))
    }

    /// Finds the residency range of a (rank, tier) under an alias. Returns its index, or the index to insert it at.
    #[inline]
    pub fn find(&self, rank_tier: RankTier, alias: u32) -> Result<usize, usize> {
        let key = order(rank_tier, alias);
        if let [only] = self.residency_ranges.as_slice() {
            return match only.order().cmp(&key) {
                std::cmp::Ordering::Equal => Ok(0),
                std::cmp::Ordering::Less => Err(1),
                std::cmp::Ordering::Greater => Err(0),
            };
        }
        self.residency_ranges.binary_search_by_key(&key, ResidencyRange::order)
    }

    /// Returns the residency ranges of a rank, over all tiers and aliases.
    #[inline]
    pub fn of_rank(&self, rank: u32) -> &[ResidencyRange] {
        if let [only] = self.residency_ranges.as_slice() {
            return if only.rank_tier.rank() == rank { &self.residency_ranges } else { &[] };
        }
        let from = self.residency_ranges.partition_point(|range| range.rank_tier.rank() < rank);
        let rest = self.residency_ranges.get(from..).unwrap_or_default();
        let count = rest.iter().take_while(|range| range.rank_tier.rank() == rank).count();
        rest.get(..count).unwrap_or_default()
    }

    /// Returns the sequence hash before the first block, if it is known.
    pub fn prefix(&self) -> Option<u64> {
        Some(self.prefix.load(Ordering::Relaxed)).filter(|hash| *hash != 0)
    }

    /// Stores the sequence hash before the first block.
    pub fn set_prefix(&self, hash: u64) {
        self.prefix.store(hash, Ordering::Relaxed);
    }

    /// Returns the heap memory, in bytes.
    pub fn heap(&self) -> usize {
        self.chunks.capacity() * 4 + self.residency_ranges.capacity() * size_of::<ResidencyRange>()
    }
}

/// The tier of checkpoints, from 0: blocks at which a reusable prefix of a hybrid model may end.
pub const CHECKPOINT: u32 = 4;

/// A rank and a tier: the slot of the rank shifted left by 3, plus the tier from 0.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct RankTier(u32);

impl RankTier {
    #[inline]
    pub const fn new(rank: u32, tier: u32) -> Self {
        Self(rank << 3 | (tier & 7))
    }

    /// Returns the slot of the rank.
    #[inline]
    pub const fn rank(self) -> u32 {
        self.0 >> 3
    }

    /// Returns the tier, from 0.
    #[inline]
    pub const fn tier(self) -> u32 {
        self.0 & 7
    }
}

#[inline]
const fn order(rank_tier: RankTier, alias: u32) -> u64 {
    (rank_tier.0 as u64) << 32 | alias as u64
}

/// Blocks of a node that are resident in one tier of a rank, under one alias.
#[derive(Clone, Copy, Default)]
pub struct ResidencyRange {
    pub rank_tier: RankTier,
    pub alias: u32,
    /// The first resident depth.
    pub lo: u32,
    /// The depth after the last resident one.
    pub hi: u32,
    /// Id of the bitmap; 0 if the range has no holes.
    pub bits: u32,
    /// Index of this range in the rank's `residencies`.
    pub listed_at: u32,
}

impl ResidencyRange {
    #[inline]
    pub fn order(&self) -> u64 {
        order(self.rank_tier, self.alias)
    }
}

/// Bitmap of the resident blocks of a range with holes. Bit i stands for block i of the node.
#[derive(Default)]
pub struct Bits {
    /// Words from the first one in which a bit was ever set, so that few blocks at a great depth need little memory.
    words: Vec<u64>,
    /// Number of words before them.
    before: u32,
    /// Number of bits that are set.
    pub count: u32,
}

impl Bits {
    pub fn range(lo: u32, hi: u32) -> Self {
        let mut bits = Self::default();
        for at in lo..hi {
            bits.set(at);
        }
        bits
    }

    /// Returns the word of a bit.
    #[inline]
    fn word(&self, at: u32) -> u64 {
        (at / 64).checked_sub(self.before).and_then(|place| self.words.get(place as usize)).copied().unwrap_or(0)
    }

    #[inline]
    fn word_mut(&mut self, at: u32) -> Option<&mut u64> {
        self.words.get_mut((at / 64).checked_sub(self.before)? as usize)
    }

    #[inline]
    pub fn get(&self, at: u32) -> bool {
        self.word(at) >> (at % 64) & 1 != 0
    }

    /// Sets a bit. Returns whether it was clear.
    pub fn set(&mut self, at: u32) -> bool {
        let word_at = at / 64;
        if self.words.is_empty() {
            self.before = word_at;
        }
        if let Some(more) = self.before.checked_sub(word_at) {
            self.words.splice(0..0, std::iter::repeat_n(0, more as usize));
            self.before = word_at;
        }
        let place = (word_at - self.before) as usize;
        if self.words.len() <= place {
            self.words.resize(place + 1, 0);
        }
        let Some(word) = self.words.get_mut(place) else { return false };
        let new = *word >> (at % 64) & 1 == 0;
        *word |= 1 << (at % 64);
        self.count += u32::from(new);
        new
    }

    /// Clears a bit. Returns whether it was set.
    pub fn clear(&mut self, at: u32) -> bool {
        let Some(word) = self.word_mut(at) else { return false };
        let was = *word >> (at % 64) & 1 != 0;
        *word &= !(1 << (at % 64));
        self.count -= u32::from(was);
        was
    }

    /// Returns the first position from `at` on whose bit is `value`; `until` if there is none below it.
    pub fn next(&self, at: u32, until: u32, value: bool) -> u32 {
        let mut at = at;
        while at < until {
            let word = self.word(at);
            let word = (if value { word } else { !word }) >> (at % 64);
            if word != 0 {
                return (at + word.trailing_zeros()).min(until);
            }
            at = (at / 64 + 1) * 64;
        }
        until
    }

    /// Returns the position after the last set bit below `until`.
    pub fn last(&self, until: u32) -> u32 {
        let mut at = until;
        while at > 0 && !self.get(at - 1) {
            let below = self.word(at - 1) & (u64::MAX >> (63 - (at - 1) % 64));
            at = if below == 0 { (at - 1) / 64 * 64 } else { (at - 1) / 64 * 64 + 64 - below.leading_zeros() };
        }
        at
    }

    pub fn heap(&self) -> usize {
        self.words.capacity() * 8
    }
}

/// Engine hashes that only one rank uses for blocks of a node.
#[derive(Default)]
pub struct HashAlias {
    /// The rank's slot.
    pub rank: u32,
    pub node: u32,
    /// Depth of its first block.
    pub start: u32,
    pub len: u32,
    pub chunks: Vec<u32>,
}

impl HashAlias {
    #[inline]
    pub fn end(&self) -> u32 {
        self.start + self.len
    }

    /// Returns the slot of the block at a depth.
    #[inline]
    pub fn slot(&self, depth: u32) -> Slot {
        let offset = depth.wrapping_sub(self.start);
        self.chunks.get((offset / LANES) as usize).map_or(u32::MAX, |&chunk| slot(chunk, offset % LANES))
    }

    pub fn heap(&self) -> usize {
        self.chunks.capacity() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_know_their_edges() {
        let mut bits = Bits::range(3, 200);
        assert_eq!((bits.count, bits.next(0, 300, true), bits.next(3, 300, false), bits.last(300)), (197, 3, 200, 200));
        assert!(bits.clear(64) && !bits.clear(64));
        assert_eq!((bits.next(3, 300, false), bits.next(64, 300, true), bits.last(65)), (64, 65, 64));
        for at in 100..200 {
            bits.clear(at);
        }
        assert_eq!((bits.last(300), bits.last(65), bits.next(99, 300, false)), (100, 64, 100));
        assert_eq!(Bits::default().last(500), 0);
        let mut deep = Bits::range(500_000, 500_010);
        assert!(deep.heap() <= 64 && !deep.get(3) && deep.get(500_000));
        assert_eq!(
            (deep.next(0, 600_000, true), deep.next(0, 600_000, false), deep.last(600_000)),
            (500_000, 0, 500_010)
        );
        assert!(deep.set(499_000) && deep.set(70) && !deep.set(500_009) && !deep.clear(69) && deep.clear(500_000));
        assert_eq!((deep.count, deep.next(0, 600_000, true), deep.last(500_000)), (11, 70, 499_001));
        assert_eq!(Bits::default().next(5, 500, true), 500);
    }
}
