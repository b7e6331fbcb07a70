//! The prefix index: a tree of runs of blocks, who holds which of them, and a table from engine hashes to blocks.
//!
//! Places are exact: a block's place is where the path of local hashes leads from the root, compared hash by hash. An
//! engine hash is found through a table that holds 5 bytes for it; a run's blocks have one engine hash each that all
//! ranks share, and a rank that knows a block by another name has a label of its own. See `bench/README.md`.

use crate::blocks::{Blocks, LabelBlocks, Slot, bit, slot};
use crate::hash::Secret;
use crate::memory::{prefetch, trim_heap};
use crate::ranks::{Counting, Held, Name, Rank, Ranks, Spot, extra_key};
use crate::runs::{Bits, Holding, Label, ROOT, Run, SHARED, Seat};
use crate::table::Table;
use crate::tagmap::TagMap;

/// Ids of runs and labels stay below this.
pub const MAX_RECORDS: u32 = 1 << 30;

/// Blocks that a departure must free before the heap is trimmed: trimming walks the whole heap.
const TRIM_AFTER: u64 = 1 << 17;

/// Who holds which blocks.
pub struct Index {
    pub(crate) secret: Secret,
    pub(crate) blocks: Blocks,
    pub(crate) label_blocks: LabelBlocks,
    pub(crate) runs: Table<Run>,
    pub(crate) labels: Table<Label>,
    pub(crate) bits: Table<Bits>,
    /// Shared engine hashes, by their own hash; refers to slots of `blocks`.
    pub(crate) shared: TagMap,
    /// Engine hashes of labels, by their and their rank's hash; refers to slots of `label_blocks`.
    pub(crate) private: TagMap,
    /// Branches, by (run, depth, first local hash); refers to runs.
    pub(crate) branches: TagMap,
    pub(crate) ranks: Ranks,
    /// (rank, engine hash, tier) triples.
    pub(crate) entries: u64,
    /// Those of other tiers than the first.
    pub(crate) slow_entries: u64,
    /// Entries whose ancestors are unknown.
    pub(crate) floating: u64,
    /// Bytes on the heap that belong to runs, labels and bitmaps.
    pub(crate) heap: usize,
    /// Runs that may have blocks nobody holds.
    pub(crate) loose: Vec<u32>,
    pub(crate) unlisting: Vec<(u64, Slot)>,
    pub(crate) scratch: crate::store::Scratch,
    pub(crate) max_blocks: u64,
    pub(crate) max_bytes: u64,
    pub(crate) check_digests: bool,
    trim_debt: u64,
}

impl Index {
    /// An empty index. A bound of 0 is none.
    pub fn new(max_blocks: u64, max_bytes: u64, check_digests: bool) -> Self {
        Self {
            secret: Secret::random(),
            blocks: Blocks::new(),
            label_blocks: LabelBlocks::new(),
            runs: Table::new(),
            labels: Table::new(),
            bits: Table::new(),
            shared: TagMap::new(),
            private: TagMap::new(),
            branches: TagMap::new(),
            ranks: Ranks::default(),
            entries: 0,
            slow_entries: 0,
            floating: 0,
            heap: 0,
            loose: Vec::new(),
            unlisting: Vec::new(),
            scratch: Default::default(),
            max_blocks,
            max_bytes,
            check_digests,
            trim_debt: 0,
        }
    }

    /// Bytes in memory.
    pub fn memory_bytes(&self) -> usize {
        self.blocks.pages().bytes()
            + self.label_blocks.pages().bytes()
            + self.runs.bytes()
            + self.labels.bytes()
            + self.bits.bytes()
            + self.shared.bytes()
            + self.private.bytes()
            + self.branches.bytes()
            + self.ranks.heap()
            + self.heap
            + self.scratch.heap()
    }

    /// The most table entries that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.shared.most_moved().max(self.private.most_moved()).max(self.branches.most_moved())
    }

    /// Whether the index is over one of its bounds.
    pub(crate) fn over_bounds(&self) -> bool {
        (self.max_blocks > 0 && self.entries > self.max_blocks)
            || (self.max_bytes > 0 && self.memory_bytes() as u64 > self.max_bytes)
    }

    // ---- finding ----

    /// The run that branches off `run` at `depth` with this local hash.
    #[inline]
    pub(crate) fn branch(&self, run: u32, depth: u32, local: u64) -> Option<u32> {
        self.branches.find(branch_hash(self.secret, run, depth, local), |id| {
            let branch = self.runs.at(id);
            branch.parent == run && branch.start == depth && self.blocks.local(branch.slot(depth)) == local
        })
    }

    /// Whether a holding has the block at a depth.
    #[inline]
    pub(crate) fn has(&self, run: &Run, holding: &Holding, depth: u32) -> bool {
        holding.lo <= depth
            && depth < holding.hi
            && (holding.bits == 0 || self.bits.at(holding.bits).get(depth - run.start))
    }

    /// Whether a rank holds a block by a label, in any tier.
    #[inline]
    pub(crate) fn holds(&self, rank: u32, spot: Spot) -> bool {
        let run = self.runs.at(spot.run);
        run.of_rank(rank).iter().any(|holding| holding.label == spot.label && self.has(run, holding, spot.depth))
    }

    /// The place of a shared slot.
    #[inline]
    pub(crate) fn spot_of(&self, at: Slot) -> Spot {
        let header = self.blocks.header(at);
        let depth = self.runs.at(header.owner).start + u32::from(header.number) * 8 + (at & 7);
        Spot { run: header.owner, label: SHARED, depth }
    }

    /// Where a rank holds an engine hash. `hash` is the secret's mix of it.
    pub(crate) fn locate(&self, rank: u32, engine: u64, hash: u64) -> Option<Spot> {
        let mut spot = None;
        let is_it = |at: Slot| {
            if self.blocks.engine(at) != engine {
                return false;
            }
            let candidate = self.spot_of(at);
            let held = self.holds(rank, candidate);
            if held {
                spot = Some(candidate);
            }
            held
        };
        if self.shared.find(hash, is_it).is_some() {
            return spot;
        }
        if self.ranks.get(rank).is_none_or(|rank| rank.private == 0) {
            return None;
        }
        self.private.find(private_hash(self.secret, rank, engine), |at| {
            let header = self.label_blocks.header(at);
            let label = self.labels.at(header.owner);
            if self.label_blocks.engine(at) != engine || label.rank != rank {
                return false;
            }
            let depth = label.start + u32::from(header.number) * 8 + (at & 7);
            spot = Some(Spot { run: label.run, label: header.owner, depth });
            true
        });
        spot
    }

    /// The engine hash of a block under a label; None past the label's ends.
    #[inline]
    pub(crate) fn engine_at(&self, spot: Spot) -> Option<u64> {
        if spot.label == SHARED {
            let run = self.runs.at(spot.run);
            (run.start <= spot.depth && spot.depth < run.end()).then(|| self.blocks.engine(run.slot(spot.depth)))
        } else {
            let label = self.labels.at(spot.label);
            (label.start <= spot.depth && spot.depth < label.end())
                .then(|| self.label_blocks.engine(label.slot(spot.depth)))
        }
    }

    /// Key of a block in its rank's extra copies.
    #[inline]
    pub(crate) fn extra(&self, tier: u32, spot: Spot) -> u64 {
        let at = if spot.label == SHARED {
            self.runs.at(spot.run).slot(spot.depth)
        } else {
            self.labels.at(spot.label).slot(spot.depth)
        };
        extra_key(tier, spot.label, at)
    }

    /// Copies of a held block in a tier.
    pub(crate) fn copies(&self, rank: &Rank, tier: u32, spot: Spot) -> u32 {
        if rank.extras.is_empty() {
            return 1;
        }
        rank.extras.get(&self.extra(tier, spot)).map_or(1, |extra| extra.saturating_add(1))
    }

    // ---- holding ----

    /// Lets a seat hold the blocks `from..to` of a run by a label. Those that it holds already gain a copy if copies
    /// are counted.
    pub(crate) fn hold(&mut self, seat: Seat, run_id: u32, label: u32, from: u32, to: u32, counting: Counting) {
        let run = self.runs.at_mut(run_id);
        let start = run.start;
        let mut again: Vec<u32> = Vec::new();
        let mut repeated = 0..0;
        let new;
        match run.find(seat, label) {
            Err(at) => {
                let Some(rank) = self.ranks.get_mut(seat.rank()) else { return };
                let listed_at = rank.held.len() as u32;
                rank.held.push(Held { run: run_id, seat, label });
                let before = run.heap();
                if run.holdings.capacity() == 0 {
                    run.holdings.reserve_exact(1);
                }
                run.holdings.insert(at, Holding { seat, label, lo: from, hi: to, bits: 0, listed_at });
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
        if let Some(rank) = self.ranks.get_mut(seat.rank()) {
            rank.entries += u64::from(new);
        }
        self.entries += u64::from(new);
        if seat.tier() > 0 {
            self.slow_entries += u64::from(new);
        }
        for depth in repeated.chain(again) {
            let key = self.extra(seat.tier(), Spot { run: run_id, label, depth });
            let Some(rank) = self.ranks.get_mut(seat.rank()) else { return };
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
    pub(crate) fn release(&mut self, seat: Seat, run_id: u32, label: u32, from: u32, to: u32) {
        let gone = u64::from(to - from);
        if let Some(rank) = self.ranks.get_mut(seat.rank()) {
            rank.entries -= gone;
            if !rank.extras.is_empty() {
                for depth in from..to {
                    let key = self.extra(seat.tier(), Spot { run: run_id, label, depth });
                    if let Some(rank) = self.ranks.get_mut(seat.rank()) {
                        rank.extras.remove(&key);
                    }
                }
            }
        }
        self.entries -= gone;
        if seat.tier() > 0 {
            self.slow_entries -= gone;
        }
        let run = self.runs.at_mut(run_id);
        let (start, end) = (run.start, run.end());
        let Ok(at) = run.find(seat, label) else { return };
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
            self.unlist_private(seat.rank(), run_id, label, from, to);
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
        let Some(rank) = self.ranks.get_mut(holding.seat.rank()) else { return };
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
            if let Ok(at) = run.find(moved.seat, moved.label)
                && let Some(holding) = run.holdings.get_mut(at)
            {
                holding.listed_at = listed_at as u32;
            }
        }
    }

    /// Takes the engine hashes of a label that its rank holds in no tier any more out of the table, and the label's end
    /// with them.
    pub(crate) fn unlist_private(&mut self, rank: u32, run_id: u32, label_id: u32, from: u32, to: u32) {
        for depth in from..to {
            if self.holds(rank, Spot { run: run_id, label: label_id, depth }) {
                continue;
            }
            let at = self.labels.at(label_id).slot(depth);
            let listed = self.label_blocks.header(at).listed & bit(at) != 0;
            if !listed {
                continue;
            }
            let hash = private_hash(self.secret, rank, self.label_blocks.engine(at));
            let (secret, label_blocks, labels) = (self.secret, &self.label_blocks, &self.labels);
            self.private.remove(hash, at, |at| private_slot_hash(secret, label_blocks, labels, at));
            if let Some(header) = self.label_blocks.header_mut(at) {
                header.listed &= !bit(at);
            }
            if let Some(rank) = self.ranks.get_mut(rank) {
                rank.private -= 1;
            }
        }
        let held = self.runs.at(run_id).of_rank(rank);
        let end = held.iter().filter(|holding| holding.label == label_id).map(|holding| holding.hi).max();
        let label = self.labels.at_mut(label_id);
        let before = label.heap();
        label.len = end.unwrap_or(label.start) - label.start;
        while label.chunks.len() as u32 > label.len.div_ceil(8) {
            if let Some(chunk) = label.chunks.pop() {
                self.label_blocks.pages_mut().free(chunk);
            }
        }
        if label.len == 0 {
            self.labels.take(label_id);
            self.heap -= before;
        }
    }

    /// Ends all that a rank holds of one block, in every tier.
    pub(crate) fn release_everywhere(&mut self, rank: u32, spot: Spot) {
        for tier in 0..4 {
            let seat = Seat::new(rank, tier);
            let run = self.runs.at(spot.run);
            let held = run.find(seat, spot.label).ok().and_then(|at| run.holdings.get(at));
            if held.is_some_and(|holding| self.has(run, holding, spot.depth)) {
                self.release(seat, spot.run, spot.label, spot.depth, spot.depth + 1);
            }
        }
        if spot.label == SHARED {
            let run = self.runs.at(spot.run);
            let held = |holding: &Holding| holding.label == SHARED && self.has(run, holding, spot.depth);
            if !run.holdings.iter().any(held) {
                let at = run.slot(spot.depth);
                self.unlist(at);
            }
        }
        self.loose.push(spot.run);
    }

    /// Takes a shared engine hash out of the table.
    fn unlist(&mut self, at: Slot) {
        if self.blocks.header(at).listed & bit(at) == 0 {
            return;
        }
        let hash = self.secret.mix(self.blocks.engine(at));
        let (secret, blocks) = (self.secret, &self.blocks);
        self.shared.remove(hash, at, |at| secret.mix(blocks.engine(at)));
        if let Some(header) = self.blocks.header_mut(at) {
            header.listed &= !bit(at);
            header.doubled &= !bit(at);
        }
    }

    // ---- tidying ----

    /// Frees what nobody holds of the runs that were touched.
    pub(crate) fn tidy(&mut self) {
        while let Some(run) = self.loose.pop() {
            self.tidy_run(run);
        }
    }

    fn tidy_run(&mut self, id: u32) {
        let mut id = id;
        while id != ROOT {
            let run = self.runs.at(id);
            if run.len == 0 {
                return;
            }
            if run.holdings.is_empty() && run.children == 0 {
                let parent = run.parent;
                self.free_run(id);
                if parent != ROOT {
                    let above = self.runs.at_mut(parent);
                    above.children = above.children.saturating_sub(1);
                    if above.children == 0 {
                        above.deepest_branch = above.start;
                        above.dropped = u32::MAX;
                    }
                }
                id = parent;
                continue;
            }
            // With many holders, the look at all of them is spread over as many removals.
            if (run.dropped as usize).saturating_mul(4) >= run.holdings.len() {
                let held = run.holdings.iter().map(|holding| holding.hi).max().unwrap_or(run.start);
                let end = if run.children > 0 { held.max(run.deepest_branch) } else { held };
                if end < run.end() && end > run.start {
                    self.cut(id, end);
                }
                self.runs.at_mut(id).dropped = 0;
            }
            return;
        }
    }

    /// Takes the engine hashes from a depth on out of the table. Chunks that lie behind it altogether are left marked as
    /// listed: they are freed next.
    fn unlist_from(&mut self, id: u32, depth: u32) {
        let mut unlisting = std::mem::take(&mut self.unlisting);
        let first = depth - self.runs.at(id).start;
        let mut number = first / 8;
        while let Some(&chunk) = self.runs.at(id).chunks.get(number as usize) {
            let listed = self.blocks.header(slot(chunk, 0)).listed;
            let engines = &self.blocks.chunk(chunk).engines;
            for (lane, engine) in (0u32..).zip(engines) {
                if listed & 1 << lane != 0 && number * 8 + lane >= first {
                    let hash = self.secret.mix(*engine);
                    self.shared.prefetch(hash);
                    unlisting.push((hash, slot(chunk, lane)));
                }
            }
            if number == first / 8
                && let Some(header) = self.blocks.header_mut(slot(chunk, 0))
            {
                let kept = (1u8 << (first % 8)) - 1;
                header.listed &= kept;
                header.doubled &= kept;
            }
            if unlisting.len() >= 32 {
                self.unlist_all(&mut unlisting);
            }
            number += 1;
        }
        self.unlist_all(&mut unlisting);
        self.unlisting = unlisting;
    }

    fn unlist_all(&mut self, unlisting: &mut Vec<(u64, Slot)>) {
        let (secret, blocks) = (self.secret, &self.blocks);
        for (hash, at) in unlisting.drain(..) {
            self.shared.remove(hash, at, |at| secret.mix(blocks.engine(at)));
        }
    }

    /// Ends a run at a depth.
    fn cut(&mut self, id: u32, end: u32) {
        self.unlist_from(id, end);
        let run = self.runs.at_mut(id);
        let before = run.heap();
        run.len = end - run.start;
        let chunks = run.len.div_ceil(8) as usize;
        for chunk in run.chunks.drain(chunks.min(run.chunks.len())..) {
            self.blocks.pages_mut().free(chunk);
        }
        if run.chunks.capacity() > 2 * run.chunks.len() + 8 {
            run.chunks.shrink_to(run.chunks.len() + 4);
        }
        self.heap = self.heap + run.heap() - before;
    }

    /// Removes a run that nobody holds and nothing branches off.
    fn free_run(&mut self, id: u32) {
        let run = self.runs.at(id);
        let (start, parent) = (run.start, run.parent);
        let hash = branch_hash(self.secret, parent, start, self.blocks.local(run.slot(start)));
        self.unlist_from(id, start);
        let (secret, runs, blocks) = (self.secret, &self.runs, &self.blocks);
        self.branches.remove(hash, id, |id| run_hash(secret, runs, blocks, id));
        let run = self.runs.take(id);
        self.heap -= run.heap();
        self.trim_debt += u64::from(run.len);
        for chunk in run.chunks {
            self.blocks.pages_mut().free(chunk);
        }
    }

    /// Lets memory that is free go back to the system. `departed`: much may have gone at once.
    pub(crate) fn give_back(&mut self, departed: bool) {
        self.blocks.pages_mut().give_back();
        self.label_blocks.pages_mut().give_back();
        if self.runs.len() == 0 {
            self.runs.shrink();
            self.labels.shrink();
            self.bits.shrink();
            self.shared.shrink();
            self.private.shrink();
            self.branches.shrink();
            self.loose = Vec::new();
        }
        if departed && self.trim_debt > TRIM_AFTER {
            self.trim_debt = 0;
            trim_heap();
        }
    }

    // ---- ranks ----

    /// Drops all that a rank holds, in one tier or in all. Returns the entries dropped.
    pub(crate) fn drop_held(&mut self, slot: u32, tier: Option<u32>) -> u64 {
        let Some(rank) = self.ranks.get_mut(slot) else { return 0 };
        let before = rank.entries;
        rank.tail = None;
        rank.removed = None;
        let dropped = rank.floating.drop_tier(tier);
        rank.entries -= dropped.0;
        self.entries -= dropped.0;
        self.slow_entries -= dropped.1;
        self.floating -= dropped.0;
        let mut left = rank.held.len();
        while left > 0 {
            left -= 1;
            let Some(&held) = self.ranks.get(slot).and_then(|rank| rank.held.get(left)) else { continue };
            if tier.is_some_and(|tier| held.seat.tier() != tier) {
                continue;
            }
            self.release_whole(held);
            self.loose.push(held.run);
            if self.loose.len() >= 256 {
                self.tidy();
            }
        }
        self.tidy();
        before - self.ranks.get(slot).map_or(0, |rank| rank.entries)
    }

    /// Ends a holding.
    fn release_whole(&mut self, held: Held) {
        let run = self.runs.at_mut(held.run);
        run.dropped = u32::MAX;
        let start = run.start;
        let Ok(at) = run.find(held.seat, held.label) else { return };
        let Some(&holding) = run.holdings.get(at) else { return };
        if holding.bits == 0 {
            self.release(held.seat, held.run, held.label, holding.lo, holding.hi);
            return;
        }
        let mut from = holding.lo;
        while from < holding.hi {
            let bits = self.bits.at(holding.bits);
            from = start + bits.next(from - start, holding.hi - start, true);
            let to = start + bits.next(from - start, holding.hi - start, false);
            if from < to {
                self.release(held.seat, held.run, held.label, from, to);
            }
            // A holding without holes left has no bitmap any more, and lasts to its end.
            let run = self.runs.at(held.run);
            match run.find(held.seat, held.label).ok().and_then(|at| run.holdings.get(at)) {
                Some(rest) if rest.bits == 0 => {
                    let (lo, hi) = (rest.lo, rest.hi);
                    self.release(held.seat, held.run, held.label, lo, hi);
                    return;
                }
                Some(_) => from = to,
                None => return,
            }
        }
    }

    /// The slot of a rank, which is added if it is not there.
    pub(crate) fn rank_slot(&mut self, name: Name, incarnation: u64) -> Option<u32> {
        match self.ranks.slot_of(name) {
            Some(slot) => Some(slot),
            None => self.ranks.add(Rank::new(name, incarnation, 0)),
        }
    }

    /// Forgets a rank. Returns the entries dropped.
    pub fn remove_rank(&mut self, name: Name) -> u64 {
        let Some(slot) = self.ranks.slot_of(name) else { return 0 };
        let dropped = self.drop_held(slot, None);
        self.ranks.remove(slot);
        self.give_back(true);
        dropped
    }

    /// Replaces a rank by an empty one. Returns the entries dropped.
    pub fn reset_rank(&mut self, name: Name, incarnation: u64, next_event_id: u64, partial: bool) -> u64 {
        let Some(slot) = self.rank_slot(name, incarnation) else { return 0 };
        let dropped = self.drop_held(slot, None);
        if let Some(rank) = self.ranks.get_mut(slot) {
            *rank = Rank { missing: partial, ..Rank::new(name, incarnation, next_event_id) };
        }
        self.give_back(true);
        dropped
    }

    /// Sequence hash of the block before a run's first one.
    pub(crate) fn prefix(&self, id: u32) -> u64 {
        // Up to an ancestor whose prefix is known or that starts a sequence, then down again.
        let mut path = Vec::new();
        let mut at = id;
        let mut hash = 0;
        while at != ROOT {
            let run = self.runs.at(at);
            if run.start == 0 {
                break;
            }
            if let Some(known) = run.prefix() {
                hash = known;
                break;
            }
            path.push(at);
            at = run.parent;
        }
        // `at` is the lowest run whose prefix is known: `hash`, or none at depth 0.
        for below in path.into_iter().rev() {
            let run = self.runs.at(at);
            let until = self.runs.at(below).start;
            for depth in run.start..until {
                hash = crate::hash::sequence_hash(depth, hash, self.blocks.local(run.slot(depth)));
            }
            self.runs.at(below).set_prefix(hash);
            at = below;
        }
        hash
    }

    /// Asks for the local hashes of a chunk.
    pub(crate) fn chunk_prefetch(&self, chunk: u32) {
        prefetch(&self.blocks.chunk(chunk).locals);
    }

    /// Asks for the engine hashes of a chunk.
    pub(crate) fn chunk_prefetch_engines(&self, chunk: u32) {
        prefetch(&self.blocks.chunk(chunk).engines);
    }
}

/// Turns a bitmap without holes into a plain range.
fn close_holes(bits: &mut Table<Bits>, heap: &mut usize, holding: &mut Holding) {
    if holding.bits != 0 && bits.at(holding.bits).count == holding.hi - holding.lo {
        *heap -= bits.take(holding.bits).heap();
        holding.bits = 0;
    }
}

#[inline]
pub(crate) fn branch_hash(secret: Secret, run: u32, depth: u32, local: u64) -> u64 {
    secret.mix_pair(u64::from(run) << 32 | u64::from(depth), local)
}

/// The hash under which a run is in the table of branches.
pub(crate) fn run_hash(secret: Secret, runs: &Table<Run>, blocks: &Blocks, id: u32) -> u64 {
    let run = runs.at(id);
    branch_hash(secret, run.parent, run.start, blocks.local(run.slot(run.start)))
}

#[inline]
pub(crate) fn private_hash(secret: Secret, rank: u32, engine: u64) -> u64 {
    secret.mix_pair(u64::from(rank), engine)
}

/// The hash under which a label's slot is in the table of private engine hashes.
pub(crate) fn private_slot_hash(secret: Secret, blocks: &LabelBlocks, labels: &Table<Label>, at: Slot) -> u64 {
    private_hash(secret, labels.at(blocks.header(at).owner).rank, blocks.engine(at))
}
