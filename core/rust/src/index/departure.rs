//! Adds, resets and removes ranks.

use crate::index::Index;
use crate::index::tree::ranks::{Name, Rank, Residency};

impl Index {
    /// Drops all resident blocks of a rank, in one tier or in all. Returns the number of entries dropped.
    pub(crate) fn drop_resident(&mut self, slot: u32, tier: Option<u32>) -> u64 {
        self.changes += 1;
        let Some(rank) = self.ranks.get_mut(slot) else { return 0 };
        let before = rank.entries;
        rank.tail = None;
        rank.removed = None;
        let mut left = rank.residencies.len();
        let orphans = rank.orphans.drop_tier(tier);
        self.count_orphan(slot, orphans, -1);
        while left > 0 {
            left -= 1;
            let Some(&resident) = self.ranks.get(slot).and_then(|rank| rank.residencies.get(left)) else { continue };
            if tier.is_some_and(|tier| resident.rank_tier.tier() != tier) {
                continue;
            }
            self.release_whole(resident);
            self.loose.push(resident.node);
            if self.loose.len() >= 256 {
                self.compact();
            }
        }
        self.compact();
        self.ranks.weigh(slot);
        before - self.ranks.get(slot).map_or(0, |rank| rank.entries)
    }

    /// Removes a whole residency range.
    fn release_whole(&mut self, resident: Residency) {
        let node = self.nodes.at_mut(resident.node);
        node.dropped = u32::MAX;
        let start = node.start;
        let Ok(at) = node.find(resident.rank_tier, resident.alias) else { return };
        let Some(&range) = node.residency_ranges.get(at) else { return };
        if range.bits == 0 {
            self.release(resident.rank_tier, resident.node, resident.alias, range.lo, range.hi);
            return;
        }
        let mut from = range.lo;
        while from < range.hi {
            let bits = self.bits.at(range.bits);
            from = start + bits.next(from - start, range.hi - start, true);
            let to = start + bits.next(from - start, range.hi - start, false);
            if from < to {
                self.release(resident.rank_tier, resident.node, resident.alias, from, to);
            }
            // A range without holes has no bitmap and can be released as a whole.
            let node = self.nodes.at(resident.node);
            match node.find(resident.rank_tier, resident.alias).ok().and_then(|at| node.residency_ranges.get(at)) {
                Some(rest) if rest.bits == 0 => {
                    let (lo, hi) = (rest.lo, rest.hi);
                    self.release(resident.rank_tier, resident.node, resident.alias, lo, hi);
                    return;
                }
                Some(_) => from = to,
                None => return,
            }
        }
    }

    /// Returns the slot of a rank. Adds the rank if it is unknown.
    pub(crate) fn rank_slot(&mut self, name: Name, incarnation: u64) -> Option<u32> {
        match self.ranks.slot_of(name) {
            Some(slot) => Some(slot),
            None => self.ranks.add(Rank::new(name, incarnation, 0)),
        }
    }

    /// Removes a rank. Returns the number of entries dropped.
    pub fn remove_rank(&mut self, name: Name) -> u64 {
        let Some(slot) = self.ranks.slot_of(name) else { return 0 };
        let dropped = self.drop_resident(slot, None);
        self.ranks.remove(slot);
        self.give_back(true);
        dropped
    }

    /// Replaces a rank by an empty one. Returns the number of entries dropped.
    pub fn reset_rank(&mut self, name: Name, incarnation: u64, next_event_id: u64, partial: bool) -> u64 {
        let Some(slot) = self.rank_slot(name, incarnation) else { return 0 };
        let dropped = self.drop_resident(slot, None);
        if let Some(rank) = self.ranks.get_mut(slot) {
            *rank = Rank { missing: partial, ..Rank::new(name, incarnation, next_event_id) };
        }
        self.ranks.weigh(slot);
        self.give_back(true);
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_is_reset_weighs_what_it_takes() {
        let mut index = Index::new(0, 1 << 30, false);
        let slots = [1, 2].map(|worker| index.rank_slot((worker, 0), 1).unwrap());
        index.ranks.get_mut(slots[0]).unwrap().extras.reserve(1000);
        index.reset_rank((1, 0), 2, 0, false);
        index.ranks.weigh(slots[1]);
        assert_eq!(index.ranks.weight(), index.ranks.heap());
    }
}
