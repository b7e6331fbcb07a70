//! Residency of blocks: adds, changes and removes residency ranges of nodes, and counts copies.

use crate::index::tree::nodes::{Bits, CHECKPOINT, RankTier, ResidencyRange, SHARED};
use crate::index::tree::ranks::{BlockPosition, Counting, Rank, Residency, extra_key};
use crate::index::{Index, MAX_RECORDS};
use crate::storage::table::Table;
use crate::wire::TIERS;

impl Index {
    /// Returns the key of a block in the extra copies of its rank.
    #[inline]
    pub(crate) fn extra(&self, tier: u32, position: BlockPosition) -> u64 {
        let at = if position.alias == SHARED {
            self.nodes.at(position.node).slot(position.depth)
        } else {
            self.aliases.at(position.alias).slot(position.depth)
        };
        extra_key(tier, position.alias, at)
    }

    /// Returns the number of copies of a resident block in a tier.
    pub(crate) fn copies(&self, rank: &Rank, tier: u32, position: BlockPosition) -> u32 {
        if rank.extras.is_empty() {
            return 1;
        }
        rank.extras.get(&self.extra(tier, position)).map_or(1, |extra| extra.saturating_add(1))
    }

    /// Sets the number of copies of a resident block.
    pub(crate) fn set_copies(&mut self, rank_tier: RankTier, position: BlockPosition, copies: u32) {
        let key = self.extra(rank_tier.tier(), position);
        debug_assert!(key >= extra_key(rank_tier.tier(), SHARED, 0));
        if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
            if copies > 1 {
                rank.extras.insert(key, copies - 1);
            } else if !rank.extras.is_empty() {
                rank.extras.remove(&key);
            }
        }
    }

    /// Adds entries of a rank to the counts, or subtracts them.
    #[inline]
    pub(crate) fn count_entries(&mut self, rank_tier: RankTier, change: i64) {
        let add = |count: &mut u64| *count = count.wrapping_add_signed(change);
        add(&mut self.entries);
        match rank_tier.tier() {
            0 => {}
            CHECKPOINT => add(&mut self.checkpoint_entries),
            _ => add(&mut self.slow_entries),
        }
        if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
            add(&mut rank.entries);
            if rank_tier.tier() == CHECKPOINT {
                add(&mut rank.checkpoints);
            }
        }
    }

    /// Makes the blocks `from..to` of a node resident in a tier of a rank, under an alias. Resident blocks get another
    /// copy if copies are counted.
    pub(crate) fn add_resident(
        &mut self,
        rank_tier: RankTier,
        node_id: u32,
        alias: u32,
        from: u32,
        to: u32,
        counting: Counting,
    ) {
        let node = self.nodes.at_mut(node_id);
        let start = node.start;
        let mut again: Vec<u32> = Vec::new();
        let mut repeated = 0..0;
        let new;
        match node.find(rank_tier, alias) {
            Err(at) => {
                let Some(rank) = self.ranks.get_mut(rank_tier.rank()) else { return };
                let listed_at = rank.residencies.len() as u32;
                rank.residencies.push(Residency { node: node_id, rank_tier, alias });
                let before = node.heap();
                if node.residency_ranges.capacity() == 0 {
                    node.residency_ranges.reserve_exact(1);
                }
                node.residency_ranges
                    .insert(at, ResidencyRange { rank_tier, alias, lo: from, hi: to, bits: 0, listed_at });
                self.heap = self.heap + node.heap() - before;
                new = to - from;
            }
            Ok(at) => {
                let Some(range) = node.residency_ranges.get_mut(at) else { return };
                if range.bits == 0 && from <= range.hi && to >= range.lo {
                    repeated = from.max(range.lo)..to.min(range.hi);
                    new = (to - from) - repeated.len() as u32;
                } else {
                    if range.bits == 0 {
                        let bits = Bits::range(range.lo - start, range.hi - start);
                        self.heap += bits.heap();
                        let Some(id) = self.bits.add(bits, MAX_RECORDS) else { return };
                        range.bits = id;
                    }
                    let bits = self.bits.at_mut(range.bits);
                    let (heap, count) = (bits.heap(), bits.count);
                    for depth in from..to {
                        if !bits.set(depth - start) {
                            again.push(depth);
                        }
                    }
                    self.heap = self.heap + bits.heap() - heap;
                    new = bits.count - count;
                }
                range.lo = range.lo.min(from);
                range.hi = range.hi.max(to);
                close_holes(&mut self.bits, &mut self.heap, range);
            }
        }
        self.count_entries(rank_tier, i64::from(new));
        for depth in repeated.chain(again) {
            let key = self.extra(rank_tier.tier(), BlockPosition { node: node_id, alias, depth });
            let Some(rank) = self.ranks.get_mut(rank_tier.rank()) else { return };
            if counting == Counting::Counted {
                let extra = rank.extras.entry(key).or_insert(0);
                *extra = extra.saturating_add(1).min(u32::MAX - 1);
            } else if rank.extras.is_empty() {
                return;
            } else {
                rank.extras.remove(&key);
            }
        }
    }

    /// Ends the residency of the blocks `from..to` and all their copies. All must be resident under the alias.
    pub(crate) fn release(&mut self, rank_tier: RankTier, node_id: u32, alias: u32, from: u32, to: u32) {
        self.count_entries(rank_tier, -i64::from(to - from));
        if self.ranks.get(rank_tier.rank()).is_some_and(|rank| !rank.extras.is_empty()) {
            for depth in from..to {
                let key = self.extra(rank_tier.tier(), BlockPosition { node: node_id, alias, depth });
                if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
                    rank.extras.remove(&key);
                }
            }
        }
        let node = self.nodes.at_mut(node_id);
        let (start, end) = (node.start, node.end());
        let Ok(at) = node.find(rank_tier, alias) else { return };
        let Some(range) = node.residency_ranges.get_mut(at) else { return };
        if to == range.hi || to == end {
            node.dropped = node.dropped.saturating_add(to - from);
        }
        let mut empty = false;
        if range.bits == 0 {
            if from == range.lo && to == range.hi {
                empty = true;
            } else if to == range.hi {
                range.hi = from;
            } else if from == range.lo {
                range.lo = to;
            } else {
                let bits = Bits::range(range.lo - start, range.hi - start);
                self.heap += bits.heap();
                let Some(id) = self.bits.add(bits, MAX_RECORDS) else { return };
                range.bits = id;
            }
        }
        if range.bits != 0 {
            let bits = self.bits.at_mut(range.bits);
            for depth in from..to {
                bits.clear(depth - start);
            }
            if bits.count == 0 {
                empty = true;
            } else {
                if from == range.lo {
                    range.lo = start + bits.next(to - start, range.hi - start, true);
                }
                if to == range.hi {
                    range.hi = start + bits.last(from - start);
                }
                close_holes(&mut self.bits, &mut self.heap, range);
            }
        }
        if empty {
            self.drop_residency_range(node_id, at);
        }
        if alias != SHARED {
            self.unlist_private(rank_tier.rank(), node_id, alias, from, to);
        }
    }

    /// Removes an empty residency range from its node and its rank.
    fn drop_residency_range(&mut self, node_id: u32, at: usize) {
        let node = self.nodes.at_mut(node_id);
        if at >= node.residency_ranges.len() {
            return;
        }
        let before = node.heap();
        let range = node.residency_ranges.remove(at);
        if node.residency_ranges.capacity() > 8 && node.residency_ranges.len() < node.residency_ranges.capacity() / 4 {
            node.residency_ranges.shrink_to(node.residency_ranges.len() * 2);
        }
        self.heap = self.heap + node.heap() - before;
        if range.bits != 0 {
            self.heap -= self.bits.take(range.bits).heap();
        }
        let Some(rank) = self.ranks.get_mut(range.rank_tier.rank()) else { return };
        let listed_at = range.listed_at as usize;
        if listed_at >= rank.residencies.len() {
            return;
        }
        rank.residencies.swap_remove(listed_at);
        if rank.residencies.capacity() > 64 && rank.residencies.len() < rank.residencies.capacity() / 4 {
            rank.residencies.shrink_to(rank.residencies.len() * 2);
        }
        if let Some(&moved) = rank.residencies.get(listed_at) {
            let node = self.nodes.at_mut(moved.node);
            if let Ok(at) = node.find(moved.rank_tier, moved.alias)
                && let Some(range) = node.residency_ranges.get_mut(at)
            {
                range.listed_at = listed_at as u32;
            }
        }
    }

    /// Ends the residency of one block on a rank, in every tier.
    pub(crate) fn release_everywhere(&mut self, rank: u32, position: BlockPosition) {
        for tier in 0..TIERS as u32 {
            let rank_tier = RankTier::new(rank, tier);
            let node = self.nodes.at(position.node);
            let resident = node.find(rank_tier, position.alias).ok().and_then(|at| node.residency_ranges.get(at));
            if resident.is_some_and(|range| self.has(node, range, position.depth)) {
                self.release(rank_tier, position.node, position.alias, position.depth, position.depth + 1);
            }
        }
        if position.alias == SHARED {
            let node = self.nodes.at(position.node);
            let resident = |range: &ResidencyRange| range.alias == SHARED && self.has(node, range, position.depth);
            if !node.residency_ranges.iter().any(resident) {
                let at = node.slot(position.depth);
                self.unlist(at);
            }
        }
        self.loose.push(position.node);
    }
}

/// Replaces a bitmap without holes by a plain range.
fn close_holes(bits: &mut Table<Bits>, heap: &mut usize, range: &mut ResidencyRange) {
    if range.bits != 0 && bits.at(range.bits).count == range.hi - range.lo {
        *heap -= bits.take(range.bits).heap();
        range.bits = 0;
    }
}
