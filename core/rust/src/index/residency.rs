//! Who holds what: holdings of runs begin, change and end, and copies are counted.

use crate::index::tree::nodes::{Bits, Holding, RankTier, SHARED};
use crate::index::tree::ranks::{BlockPosition, Counting, Held, Rank, extra_key};
use crate::index::{Index, MAX_RECORDS};
use crate::storage::table::Table;

impl Index {
    /// Key of a block in its rank's extra copies.
    #[inline]
    pub(crate) fn extra(&self, tier: u32, position: BlockPosition) -> u64 {
        let at = if position.label == SHARED {
            self.runs.at(position.run).slot(position.depth)
        } else {
            self.labels.at(position.label).slot(position.depth)
        };
        extra_key(tier, position.label, at)
    }

    /// Copies of a held block in a tier.
    pub(crate) fn copies(&self, rank: &Rank, tier: u32, position: BlockPosition) -> u32 {
        if rank.extras.is_empty() {
            return 1;
        }
        rank.extras.get(&self.extra(tier, position)).map_or(1, |extra| extra.saturating_add(1))
    }

    /// Sets the number of copies of a block that a seat holds.
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

    /// Lets a seat hold the blocks `from..to` of a run by a label. Those that it holds already gain a copy if copies
    /// are counted.
    pub(crate) fn hold(
        &mut self,
        rank_tier: RankTier,
        run_id: u32,
        label: u32,
        from: u32,
        to: u32,
        counting: Counting,
    ) {
        let run = self.runs.at_mut(run_id);
        let start = run.start;
        let mut again: Vec<u32> = Vec::new();
        let mut repeated = 0..0;
        let new;
        match run.find(rank_tier, label) {
            Err(at) => {
                let Some(rank) = self.ranks.get_mut(rank_tier.rank()) else { return };
                let listed_at = rank.held.len() as u32;
                rank.held.push(Held { run: run_id, rank_tier, label });
                let before = run.heap();
                if run.holdings.capacity() == 0 {
                    run.holdings.reserve_exact(1);
                }
                run.holdings.insert(at, Holding { rank_tier, label, lo: from, hi: to, bits: 0, listed_at });
                self.heap = self.heap + run.heap() - before;
                new = to - from;
            }
            Ok(at) => {
                let Some(holding) = run.holdings.get_mut(at) else { return };
                if holding.bits == 0 && from <= holding.hi && to >= holding.lo {
                    repeated = from.max(holding.lo)..to.min(holding.hi);
                    new = (to - from) - repeated.len() as u32;
                } else {
                    if holding.bits == 0 {
                        let bits = Bits::range(holding.lo - start, holding.hi - start);
                        self.heap += bits.heap();
                        let Some(id) = self.bits.add(bits, MAX_RECORDS) else { return };
                        holding.bits = id;
                    }
                    let bits = self.bits.at_mut(holding.bits);
                    let before = bits.heap();
                    let held = bits.count;
                    for depth in from..to {
                        if !bits.set(depth - start) {
                            again.push(depth);
                        }
                    }
                    self.heap = self.heap + bits.heap() - before;
                    new = bits.count - held;
                }
                holding.lo = holding.lo.min(from);
                holding.hi = holding.hi.max(to);
                close_holes(&mut self.bits, &mut self.heap, holding);
            }
        }
        if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
            rank.entries += u64::from(new);
        }
        self.entries += u64::from(new);
        if rank_tier.tier() > 0 {
            self.slow_entries += u64::from(new);
        }
        for depth in repeated.chain(again) {
            let key = self.extra(rank_tier.tier(), BlockPosition { run: run_id, label, depth });
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

    /// Ends the holding of the blocks `from..to`, all of which the seat holds by the label, with all their copies.
    pub(crate) fn release(&mut self, rank_tier: RankTier, run_id: u32, label: u32, from: u32, to: u32) {
        let gone = u64::from(to - from);
        if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
            rank.entries -= gone;
            if !rank.extras.is_empty() {
                for depth in from..to {
                    let key = self.extra(rank_tier.tier(), BlockPosition { run: run_id, label, depth });
                    if let Some(rank) = self.ranks.get_mut(rank_tier.rank()) {
                        rank.extras.remove(&key);
                    }
                }
            }
        }
        self.entries -= gone;
        if rank_tier.tier() > 0 {
            self.slow_entries -= gone;
        }
        let run = self.runs.at_mut(run_id);
        let (start, end) = (run.start, run.end());
        let Ok(at) = run.find(rank_tier, label) else { return };
        let Some(holding) = run.holdings.get_mut(at) else { return };
        if to == holding.hi || to == end {
            run.dropped = run.dropped.saturating_add(to - from);
        }
        let mut empty = false;
        if holding.bits == 0 {
            if from == holding.lo && to == holding.hi {
                empty = true;
            } else if to == holding.hi {
                holding.hi = from;
            } else if from == holding.lo {
                holding.lo = to;
            } else {
                let bits = Bits::range(holding.lo - start, holding.hi - start);
                self.heap += bits.heap();
                let Some(id) = self.bits.add(bits, MAX_RECORDS) else { return };
                holding.bits = id;
            }
        }
        if holding.bits != 0 {
            let bits = self.bits.at_mut(holding.bits);
            for depth in from..to {
                bits.clear(depth - start);
            }
            if bits.count == 0 {
                empty = true;
            } else {
                if from == holding.lo {
                    holding.lo = start + bits.next(to - start, holding.hi - start, true);
                }
                if to == holding.hi {
                    holding.hi = start + bits.last(from - start);
                }
                close_holes(&mut self.bits, &mut self.heap, holding);
            }
        }
        if empty {
            self.drop_holding(run_id, at);
        }
        if label != SHARED {
            self.unlist_private(rank_tier.rank(), run_id, label, from, to);
        }
    }

    /// Removes an empty holding from its run's and its rank's list.
    fn drop_holding(&mut self, run_id: u32, at: usize) {
        let run = self.runs.at_mut(run_id);
        if at >= run.holdings.len() {
            return;
        }
        let before = run.heap();
        let holding = run.holdings.remove(at);
        if run.holdings.capacity() > 8 && run.holdings.len() < run.holdings.capacity() / 4 {
            run.holdings.shrink_to(run.holdings.len() * 2);
        }
        self.heap = self.heap + run.heap() - before;
        if holding.bits != 0 {
            self.heap -= self.bits.take(holding.bits).heap();
        }
        let Some(rank) = self.ranks.get_mut(holding.rank_tier.rank()) else { return };
        let listed_at = holding.listed_at as usize;
        if listed_at >= rank.held.len() {
            return;
        }
        rank.held.swap_remove(listed_at);
        if rank.held.capacity() > 64 && rank.held.len() < rank.held.capacity() / 4 {
            rank.held.shrink_to(rank.held.len() * 2);
        }
        if let Some(&moved) = rank.held.get(listed_at) {
            let run = self.runs.at_mut(moved.run);
            if let Ok(at) = run.find(moved.rank_tier, moved.label)
                && let Some(holding) = run.holdings.get_mut(at)
            {
                holding.listed_at = listed_at as u32;
            }
        }
    }

    /// Takes the engine hashes of a label that its rank holds in no tier any more out of the table, and the label's end    /// Ends all that a rank holds of one block, in every tier.
    pub(crate) fn release_everywhere(&mut self, rank: u32, position: BlockPosition) {
        for tier in 0..4 {
            let rank_tier = RankTier::new(rank, tier);
            let run = self.runs.at(position.run);
            let held = run.find(rank_tier, position.label).ok().and_then(|at| run.holdings.get(at));
            if held.is_some_and(|holding| self.has(run, holding, position.depth)) {
                self.release(rank_tier, position.run, position.label, position.depth, position.depth + 1);
            }
        }
        if position.label == SHARED {
            let run = self.runs.at(position.run);
            let held = |holding: &Holding| holding.label == SHARED && self.has(run, holding, position.depth);
            if !run.holdings.iter().any(held) {
                let at = run.slot(position.depth);
                self.unlist(at);
            }
        }
        self.loose.push(position.run);
    }
}

/// Replaces a bitmap without holes by a plain range.
fn close_holes(bits: &mut Table<Bits>, heap: &mut usize, holding: &mut Holding) {
    if holding.bits != 0 && bits.at(holding.bits).count == holding.hi - holding.lo {
        *heap -= bits.take(holding.bits).heap();
        holding.bits = 0;
    }
}
