//! Overlap queries: how many leading blocks of a prompt are resident on each rank.

use crate::hash::sequence_hash;
use crate::index::Index;
use crate::index::tree::nodes::{CHECKPOINT, Node, ROOT, ResidencyRange};
use crate::index::tree::ranks::Rank;
use crate::wire::Writer;

/// Number of the tier of shared storage, from 0.
const SHARED_TIER: u32 = 3;

/// The part of a prompt that is in one node.
struct Stretch {
    node: u32,
    from: u32,
    to: u32,
}

impl Index {
    /// Returns the overlap of every slot to a tier (from 0) or a faster one.
    pub fn overlaps(&self, locals: &[u64], tier: u32) -> Vec<u32> {
        let mut overlaps = vec![0u32; self.ranks.slots()];
        self.for_stretches(locals, |node, stretch| {
            let mut alive = false;
            let mut rest = node.residency_ranges.as_slice();
            while let Some(first) = rest.first() {
                let rank = first.rank_tier.rank();
                let same = rest.iter().skip(1).take_while(|range| range.rank_tier.rank() == rank).count() + 1;
                let (of_rank, others) = rest.split_at_checked(same).unwrap_or((rest, &[]));
                rest = others;
                let Some(overlap) = overlaps.get_mut(rank as usize).filter(|overlap| **overlap == stretch.from) else {
                    continue;
                };
                *overlap = self.leading(node, of_rank, tier, stretch.from, stretch.to);
                alive |= *overlap == stretch.to;
            }
            alive
        });
        if self.orphan_entries > 0 {
            self.add_orphans(locals, tier, &mut overlaps);
        }
        if self.checkpoint_entries > 0 {
            self.end_at_checkpoints(locals, &mut overlaps);
        }
        overlaps
    }

    /// Ends the overlaps of ranks with checkpoints at the last one among their blocks.
    fn end_at_checkpoints(&self, locals: &[u64], overlaps: &mut [u32]) {
        let stretches = self.stretches(locals);
        let sequences = if self.orphan_entries > 0 { sequences(locals) } else { Vec::new() };
        for (_, slot) in self.ranks.in_order() {
            let Some(rank) = self.ranks.get(slot).filter(|rank| rank.checkpoints > 0) else { continue };
            let Some(overlap) = overlaps.get_mut(slot as usize) else { continue };
            let mut reached = 0;
            for stretch in stretches.iter().rev().filter(|stretch| stretch.from < *overlap) {
                let node = self.nodes.at(stretch.node);
                let of_rank = node.of_rank(slot).iter().filter(|range| range.rank_tier.tier() == CHECKPOINT);
                let last = of_rank.map(|range| self.last(node, range, stretch.to.min(*overlap))).max();
                if let Some(last) = last.filter(|last| *last > stretch.from) {
                    reached = last;
                    break;
                }
            }
            let above = sequences.get(..*overlap as usize).unwrap_or_default();
            let orphan = above.iter().rposition(|sequence| rank.orphans.holds(*sequence, CHECKPOINT..=CHECKPOINT));
            *overlap = reached.max(orphan.map_or(0, |depth| depth as u32 + 1));
        }
    }

    /// Returns the depth after the last block of a range below `to`, or a depth above no block of it.
    fn last(&self, node: &Node, range: &ResidencyRange, to: u32) -> u32 {
        let to = range.hi.min(to);
        match range.bits {
            _ if to <= range.lo => 0,
            0 => to,
            bits => node.start + self.bits.at(bits).last(to - node.start),
        }
    }

    /// Returns the leading blocks in shared storage, whichever ranks stored them.
    pub fn pooled(&self, locals: &[u64]) -> u32 {
        if self.slow_entries == 0 {
            return 0;
        }
        let stretches = self.stretches(locals);
        let sequences = if self.orphan_entries > 0 { sequences(locals) } else { Vec::new() };
        let mut pooled = 0;
        loop {
            let before = pooled;
            if let Some(stretch) = stretches.iter().find(|stretch| stretch.from <= pooled && pooled < stretch.to) {
                let node = self.nodes.at(stretch.node);
                let shared = node.residency_ranges.iter().filter(|range| range.rank_tier.tier() == SHARED_TIER);
                pooled = self.leading(node, &shared.copied().collect::<Vec<_>>(), SHARED_TIER, pooled, stretch.to);
            }
            if let Some(&sequence) = sequences.get(pooled as usize) {
                let mut ranks = self.ranks.in_order().filter_map(|(_, slot)| self.ranks.get(slot));
                pooled += u32::from(ranks.any(|rank| rank.orphans.holds(sequence, SHARED_TIER..=SHARED_TIER)));
            }
            if pooled == before {
                return pooled;
            }
        }
    }

    /// Returns the depth up to which all blocks of a node from `from` on are resident, at most `to`.
    #[inline]
    fn leading(&self, node: &Node, of_rank: &[ResidencyRange], tier: u32, from: u32, to: u32) -> u32 {
        let mut depth = from;
        loop {
            let before = depth;
            for range in of_rank.iter().filter(|range| range.rank_tier.tier() <= tier) {
                if range.lo <= depth && depth < range.hi {
                    let end = range.hi.min(to);
                    depth = if range.bits == 0 {
                        end
                    } else {
                        let bits = self.bits.at(range.bits);
                        node.start + bits.next(depth - node.start, end - node.start, false)
                    };
                }
            }
            // A range of another tier or alias may start where one ends.
            if depth == before || depth >= to || of_rank.len() == 1 {
                return depth.min(to);
            }
        }
    }

    /// Follows a prompt down the tree while it has nodes and `visit` returns true.
    fn for_stretches(&self, locals: &[u64], mut visit: impl FnMut(&Node, Stretch) -> bool) {
        let mut at = 0usize;
        let mut node_id = ROOT;
        while let Some(&next) = locals.get(at) {
            let Ok(from) = u32::try_from(at) else { return };
            let Some(branch) = self.branch(node_id, from, next) else { return };
            node_id = branch;
            let node = self.nodes.at(node_id);
            let same = self.common(node, from, locals.get(at..).unwrap_or_default());
            let to = from + same as u32;
            if same == 0 || !visit(node, Stretch { node: node_id, from, to }) {
                return;
            }
            at += same;
            if node.children == 0 {
                return;
            }
        }
    }

    /// Returns the parts of a prompt that are in the tree.
    fn stretches(&self, locals: &[u64]) -> Vec<Stretch> {
        let mut stretches = Vec::new();
        self.for_stretches(locals, |_, stretch| {
            stretches.push(stretch);
            true
        });
        stretches
    }

    /// Extends the overlaps of ranks with orphan blocks.
    fn add_orphans(&self, locals: &[u64], tier: u32, overlaps: &mut [u32]) {
        let (stretches, sequences) = (self.stretches(locals), sequences(locals));
        for (_, slot) in self.ranks.in_order() {
            let Some(rank) = self.ranks.get(slot).filter(|rank| !rank.orphans.is_empty()) else { continue };
            let Some(overlap) = overlaps.get_mut(slot as usize) else { continue };
            while let Some(&sequence) = sequences.get(*overlap as usize) {
                if rank.orphans.holds(sequence, 0..=tier) {
                    *overlap += 1;
                    continue;
                }
                let Some(stretch) = stretches.iter().find(|stretch| stretch.from <= *overlap && *overlap < stretch.to)
                else {
                    break;
                };
                let node = self.nodes.at(stretch.node);
                let depth = self.leading(node, node.of_rank(slot), tier, *overlap, stretch.to);
                if depth == *overlap {
                    break;
                }
                *overlap = depth;
            }
        }
    }

    /// Returns the number of distinct places that are resident on any rank.
    pub fn distinct_blocks(&self) -> u64 {
        let mut distinct = 0;
        for id in self.nodes.ids() {
            let node = self.nodes.at(id);
            match node.residency_ranges.as_slice() {
                [] => {}
                [only] if only.bits == 0 => distinct += u64::from(only.hi - only.lo),
                residency_ranges => {
                    let mut ordered: Vec<&ResidencyRange> = residency_ranges.iter().collect();
                    ordered.sort_unstable_by_key(|range| range.lo);
                    if ordered.iter().all(|range| range.bits == 0) {
                        let mut end = node.start;
                        for range in ordered {
                            distinct += u64::from(range.hi.saturating_sub(range.lo.max(end)));
                            end = end.max(range.hi);
                        }
                    } else {
                        let resident = |depth: &u32| residency_ranges.iter().any(|range| self.has(node, range, *depth));
                        distinct += (node.start..node.end()).filter(resident).count() as u64;
                    }
                }
            }
        }
        distinct
    }
}

/// Returns the sequence hash of each block of a prompt.
fn sequences(locals: &[u64]) -> Vec<u64> {
    let links = (0u32..).zip(locals);
    let chain = links.scan(0, |sequence, (depth, local)| {
        *sequence = sequence_hash(depth, *sequence, *local);
        Some(*sequence)
    });
    chain.collect()
}

impl Index {
    /// Returns the encoded FindMatchesResponse for a prompt.
    pub fn find_matches(&self, locals: &[u64]) -> Vec<u8> {
        let device = self.overlaps(locals, 0);
        let slower: Vec<Vec<u32>> = if self.slow_entries == 0 {
            vec![device.clone(), device.clone(), device.clone()]
        } else {
            (1..4).map(|tier| self.overlaps(locals, tier)).collect()
        };
        let slots: Vec<u32> = self.ranks.in_order().map(|(_, slot)| slot).collect();
        let ranks: Vec<&Rank> = slots.iter().filter_map(|slot| self.ranks.get(*slot)).collect();
        let mut response = Writer(Vec::with_capacity(64 + ranks.len() * 48));
        response.packed(1, ranks.iter().map(|rank| rank.name.0));
        response.packed(2, ranks.iter().map(|rank| u64::from(rank.name.1)));
        for (number, column) in (3u32..).zip(std::iter::once(&device).chain(&slower)) {
            let overlap = |slot: &u32| column.get(*slot as usize).copied().unwrap_or_default();
            response.packed(number, slots.iter().map(|slot| u64::from(overlap(slot))));
        }
        response.packed_fixed64(7, ranks.iter().map(|rank| rank.incarnation));
        response.packed(8, ranks.iter().map(|rank| rank.next_event_id));
        response.packed(9, ranks.iter().map(|rank| u64::from(rank.partial())));
        response.varint(10, locals.len() as u64);
        response.varint(11, u64::from(self.pooled(locals)));
        response.0
    }
}
