//! The ranks of an index: their cursors, and their state outside the tree.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Mutex;

use crate::index::orphans::Orphans;
use crate::index::tree::blocks::Slot;
use crate::index::tree::nodes::RankTier;

/// (worker_id, dp_rank)
pub type Name = (u64, u32);

/// How copies of a block are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Counting {
    /// Each copy is stored and removed separately.
    Counted,
    /// A block is stored once or not at all, whatever the number of events.
    Set,
}

/// A reference to a residency range, in the list of its rank.
#[derive(Clone, Copy)]
pub struct Residency {
    pub node: u32,
    pub rank_tier: RankTier,
    pub alias: u32,
}

/// The position of a block in the tree, and the alias under which a rank has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockPosition {
    pub node: u32,
    pub alias: u32,
    pub depth: u32,
}

/// A hasher for small integers that clients cannot choose.
#[derive(Default)]
pub struct SlotHasher(u64);

impl Hasher for SlotHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9E37_79B9_7F4A_7C15_F39C_C060;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// Extra copies: the number of copies beyond the first, by tier and slot.
pub type Extras = HashMap<u64, u32, BuildHasherDefault<SlotHasher>>;

/// The key of a block in `Extras`.
pub fn extra_key(tier: u32, alias: u32, slot: Slot) -> u64 {
    u64::from(tier) << 40 | u64::from(alias != crate::index::tree::nodes::SHARED) << 32 | u64::from(slot)
}

/// One rank.
pub struct Rank {
    pub name: Name,
    pub incarnation: u64,
    pub next_event_id: u64,
    /// Whether blocks may be missing for a reason other than a bound.
    pub missing: bool,
    /// Whether the rank is evicted: its events only move the cursor.
    pub evicted: bool,
    pub counting: Counting,
    /// Number of resident (engine hash, tier) pairs.
    pub entries: u64,
    /// Number of those that are checkpoints.
    pub checkpoints: u64,
    /// Number of blocks that are resident under an alias of the rank.
    pub private: u64,
    /// References to all its residency ranges.
    pub residencies: Vec<Residency>,
    pub extras: Extras,
    /// The last stored block, which is probably the parent of the next store.
    pub tail: Option<BlockPosition>,
    /// The last removed block, which is probably a neighbour of the next one.
    pub removed: Option<BlockPosition>,
    /// Its orphan blocks.
    pub orphans: Orphans,
    /// (changes, digest): its last digest, and the number of changes of the index until then.
    pub digest: Mutex<Option<(u64, u64)>>,
}

impl Rank {
    pub fn new(name: Name, incarnation: u64, next_event_id: u64) -> Self {
        Self {
            name,
            incarnation,
            next_event_id,
            missing: false,
            evicted: false,
            counting: Counting::Counted,
            entries: 0,
            checkpoints: 0,
            private: 0,
            residencies: Vec::new(),
            extras: Extras::default(),
            tail: None,
            removed: None,
            orphans: Orphans::default(),
            digest: Mutex::default(),
        }
    }

    /// Returns whether blocks may be missing.
    pub fn partial(&self) -> bool {
        self.missing || self.evicted
    }

    /// Returns the heap memory of the rank, in bytes.
    pub fn heap(&self) -> usize {
        size_of::<Self>()
            + self.residencies.capacity() * size_of::<Residency>()
            + self.extras.capacity() * 17
            + self.orphans.heap()
    }
}

/// Ranks by slot and by name. A rank keeps its slot; free slots are reused, the lowest first.
#[derive(Default)]
pub struct Ranks {
    slots: Vec<Option<Box<Rank>>>,
    by_name: BTreeMap<Name, u32>,
    free: BinaryHeap<Reverse<u32>>,
    /// Heap memory of the rank of each slot when it was last measured, in bytes.
    weights: Vec<usize>,
    /// Sum of the weights.
    weight: usize,
}

/// Exclusive upper bound of the slots of ranks, so that a `RankTier` fits into 32 bits.
const MAX_RANKS: usize = 1 << 29;

impl Ranks {
    /// Returns the slot of a rank.
    pub fn slot_of(&self, name: Name) -> Option<u32> {
        self.by_name.get(&name).copied()
    }

    #[inline]
    pub fn get(&self, slot: u32) -> Option<&Rank> {
        self.slots.get(slot as usize)?.as_deref()
    }

    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> Option<&mut Rank> {
        self.slots.get_mut(slot as usize)?.as_deref_mut()
    }

    /// Returns the number of slots, including free ones.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of ranks.
    pub fn count(&self) -> usize {
        self.by_name.len()
    }

    /// Returns slots in order of (worker_id, dp_rank).
    pub fn in_order(&self) -> impl Iterator<Item = (Name, u32)> {
        self.by_name.iter().map(|(name, slot)| (*name, *slot))
    }

    /// Adds an unknown rank; None if there are too many ranks.
    pub fn add(&mut self, rank: Rank) -> Option<u32> {
        let name = rank.name;
        let slot = match self.free.pop() {
            Some(Reverse(slot)) => slot,
            None if self.slots.len() < MAX_RANKS => {
                self.slots.push(None);
                self.weights.push(0);
                self.slots.len() as u32 - 1
            }
            None => return None,
        };
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(Box::new(rank));
        }
        self.by_name.insert(name, slot);
        Some(slot)
    }

    /// Removes and returns a rank.
    pub fn remove(&mut self, slot: u32) -> Option<Box<Rank>> {
        let rank = self.slots.get_mut(slot as usize)?.take()?;
        self.by_name.remove(&rank.name);
        self.free.push(Reverse(slot));
        self.weigh(slot);
        Some(rank)
    }

    /// Updates the weight of one rank, which is the only one that has changed.
    pub fn weigh(&mut self, slot: u32) {
        let heap = self.get(slot).map_or(0, |rank| rank.heap() + 64);
        if let Some(weight) = self.weights.get_mut(slot as usize) {
            self.weight = self.weight - *weight + heap;
            *weight = heap;
        }
    }

    /// Returns the heap memory by the last weights, in bytes.
    pub fn weight(&self) -> usize {
        self.weight + self.slots_heap()
    }

    /// Returns the heap memory of all ranks, in bytes.
    pub fn heap(&self) -> usize {
        let ranks: usize = self.slots.iter().flatten().map(|rank| rank.heap() + 64).sum();
        ranks + self.slots_heap()
    }

    fn slots_heap(&self) -> usize {
        (self.slots.capacity() + self.weights.capacity()) * 8
    }
}
