//! Reports the state of ranks and the size of the index.

use crate::index::Index;
use crate::index::tree::ranks::Name;

/// State of one rank.
pub struct RankInfo {
    pub name: Name,
    /// (incarnation, next event id)
    pub cursor: (u64, u64),
    pub blocks: u64,
    pub bytes: u64,
    pub partial: bool,
    pub evicted: bool,
}

/// Size of an index.
pub struct Stats {
    pub ranks: usize,
    pub blocks: u64,
    pub distinct_blocks: u64,
    pub memory_bytes: usize,
}

impl Index {
    /// Returns the rank of each slot.
    pub fn names_by_slot(&self) -> Vec<Option<Name>> {
        (0..self.ranks.slots() as u32).map(|slot| self.ranks.get(slot).map(|rank| rank.name)).collect()
    }

    /// Returns (incarnation, next event id) of a rank.
    pub fn cursor(&self, name: Name) -> Option<(u64, u64)> {
        let rank = self.ranks.get(self.ranks.slot_of(name)?)?;
        Some((rank.incarnation, rank.next_event_id))
    }

    /// Returns the number of a rank's entries.
    pub fn entries_of(&self, name: Name) -> u64 {
        self.ranks.slot_of(name).and_then(|slot| self.ranks.get(slot)).map_or(0, |rank| rank.entries)
    }

    /// Returns whether a rank was emptied because the index reached a bound, and stores no blocks since.
    pub fn is_evicted(&self, name: Name) -> bool {
        self.ranks.slot_of(name).and_then(|slot| self.ranks.get(slot)).is_some_and(|rank| rank.evicted)
    }

    /// Returns all ranks, in order of their names. The memory of a rank is its own records and its share of the blocks.
    pub fn rank_infos(&self) -> Vec<RankInfo> {
        let shared = self.memory_bytes().saturating_sub(self.ranks.heap()) as u64;
        let ranks = self.ranks.in_order().filter_map(|(_, slot)| self.ranks.get(slot));
        ranks
            .map(|rank| RankInfo {
                name: rank.name,
                cursor: (rank.incarnation, rank.next_event_id),
                blocks: rank.entries,
                bytes: rank.heap() as u64
                    + (u128::from(shared) * u128::from(rank.entries) / u128::from(self.entries.max(1))) as u64,
                partial: rank.partial(),
                evicted: rank.evicted,
            })
            .collect()
    }

    /// Returns the size of the index.
    pub fn stats(&self) -> Stats {
        Stats {
            ranks: self.ranks.count(),
            blocks: self.entries,
            distinct_blocks: self.distinct_blocks(),
            memory_bytes: self.memory_bytes(),
        }
    }
}
