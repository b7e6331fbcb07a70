//! Storing a chain of blocks.

use crate::blocks::{LANES, Slot, bit, slot};
use crate::floating::FloatingBlock;
use crate::hash::sequence_hash;
use crate::index::{Index, MAX_RECORDS, branch_hash, private_hash, private_slot_hash, run_hash};
use crate::ranks::{Counting, Spot, extra_key};
use crate::runs::{Label, MAX_BLOCKS, ROOT, Run, SHARED, Seat};

/// Equal engine hashes in the shared table, at most. Further ones go into labels, which are found by rank as well, so
/// that engines whose hashes are no more than counters do not make long chains.
const MAX_EQUAL: usize = 3;

/// Why a chain was not stored.
#[derive(Debug, PartialEq, Eq)]
pub enum Refused {
    /// The rank does not hold the parent.
    UnknownParent,
    /// The event breaks the contract.
    Malformed(&'static str),
    /// There is no memory, or no room for ids.
    Exhausted,
}

/// Buffers that are used again.
#[derive(Default)]
pub struct Scratch {
    pub hashes: Vec<u64>,
    seen: Vec<u32>,
    epoch: u16,
    pub engines: Vec<u64>,
    pub locals: Vec<u64>,
}

/// Buffers larger than this many words are not kept.
const KEPT_WORDS: usize = 1 << 18;

impl Scratch {
    pub fn heap(&self) -> usize {
        8 * (self.hashes.capacity() + self.engines.capacity() + self.locals.capacity()) + 4 * self.seen.capacity()
    }

    pub fn trim(&mut self) {
        for buffer in [&mut self.hashes, &mut self.engines, &mut self.locals] {
            if buffer.capacity() > KEPT_WORDS {
                *buffer = Vec::new();
            }
        }
        if self.seen.capacity() > KEPT_WORDS {
            self.seen = Vec::new();
        }
    }

    /// Whether any of the words is there twice. `self.hashes` are theirs.
    pub fn repeats(&mut self, words: &[u64]) -> bool {
        if words.len() < 2 {
            return false;
        }
        // Marks are words' numbers and, above them, the number of the call; a mark of another call is none.
        let size = (words.len() * 4).next_power_of_two().max(64);
        if self.seen.len() < size || self.epoch == u16::MAX || words.len() > 1 << 16 {
            self.seen.clear();
            self.seen.resize(size, 0);
            self.epoch = 0;
        }
        self.epoch += 1;
        let epoch = u32::from(self.epoch) << 16;
        let Some(seen) = self.seen.get_mut(..size) else { return true };
        for ((word, hash), at) in words.iter().zip(&self.hashes).zip(0u32..) {
            let mut place = *hash as usize & (size - 1);
            while let Some(mark) = seen.get_mut(place) {
                if *mark & 0xFFFF_0000 != epoch {
                    *mark = epoch | at;
                    break;
                }
                if words.get((*mark & 0xFFFF) as usize) == Some(word) {
                    return true;
                }
                place = (place + 1) & (size - 1);
            }
        }
        false
    }
}

/// What becomes of a block's engine hash.
enum Name {
    /// It is, or has become, the block's shared one.
    Shared,
    /// The rank has it in a label at this very place.
    Known(u32),
    /// The rank needs it in a label.
    Private,
}

impl Index {
    /// Whether a chain is one that may be stored. Leaves the hashes of its engine hashes for `store`.
    pub(crate) fn check_chain(&mut self, parent: Option<u64>, engines: &[u64], locals: &[u64]) -> Result<(), Refused> {
        if engines.is_empty() {
            return Err(Refused::Malformed("it has no blocks"));
        }
        if engines.len() != locals.len() {
            return Err(Refused::Malformed("it has unlike numbers of engine hashes and local hashes"));
        }
        let secret = self.secret;
        self.scratch.hashes.clear();
        self.scratch.hashes.extend(engines.iter().map(|engine| secret.mix(*engine)));
        if self.scratch.repeats(engines) {
            return Err(Refused::Malformed("an engine hash comes twice"));
        }
        if parent.is_some_and(|parent| engines.contains(&parent)) {
            return Err(Refused::Malformed("a block is its own parent"));
        }
        Ok(())
    }

    /// Stores a chain of blocks for a rank, below `parent` or from the start of a sequence. `check_chain` comes first.
    pub(crate) fn store(
        &mut self,
        seat: Seat,
        counting: Counting,
        parent: Option<u64>,
        engines: &[u64],
        locals: &[u64],
    ) -> Result<(), Refused> {
        let (run, depth) = match parent {
            None => (ROOT, 0),
            Some(parent) => match self.parent_place(seat.rank(), parent) {
                Some(Spot { run, depth, .. }) => (run, depth + 1),
                None => return self.store_floating(seat, counting, parent, engines, locals),
            },
        };
        let count = u32::try_from(engines.len()).map_err(|_| Refused::Exhausted)?;
        if depth.checked_add(count).is_none() {
            return Err(Refused::Malformed("its chain is deeper than 2^32 blocks"));
        }
        let hashes = std::mem::take(&mut self.scratch.hashes);
        let chain = Chain { seat, counting, engines, locals, hashes: &hashes };
        let stored = self.walk_and_store(&chain, run, depth);
        self.scratch.hashes = hashes;
        self.tidy();
        stored
    }

    fn parent_place(&self, rank: u32, parent: u64) -> Option<Spot> {
        if let Some(tail) = self.ranks.get(rank)?.tail
            && self.engine_at(tail) == Some(parent)
            && self.holds(rank, tail)
        {
            return Some(tail);
        }
        self.locate(rank, parent, self.secret.mix(parent))
    }

    fn walk_and_store(&mut self, chain: &Chain<'_>, run: u32, depth: u32) -> Result<(), Refused> {
        let (mut run_id, mut depth, mut at) = (run, depth, 0);
        let count = chain.locals.len();
        while at < count {
            let rest = chain.locals.get(at..).unwrap_or_default();
            let Some(&next) = rest.first() else { break };
            let run = self.runs.at(run_id);
            let same = if run_id == ROOT { 0 } else { self.common(run, depth, rest) };
            if same > 0 {
                self.cover(chain, run_id, depth, at, at + same)?;
                (at, depth) = (at + same, depth + same as u32);
                continue;
            }
            let run = self.runs.at(run_id);
            if (run.children > 0 || run_id == ROOT)
                && let Some(branch) = self.branch(run_id, depth, next)
            {
                run_id = branch;
                continue;
            }
            let extends = run_id != ROOT && depth == run.end() && run.len < MAX_BLOCKS;
            if !extends {
                run_id = self.runs.add(Run::branch(run_id, depth), MAX_RECORDS).ok_or(Refused::Exhausted)?;
            }
            let room = (MAX_BLOCKS - self.runs.at(run_id).len) as usize;
            let added = rest.len().min(room);
            let made = self.extend(run_id, rest.get(..added).unwrap_or_default());
            if !extends {
                self.link(run_id)?;
            }
            if made.is_err() {
                self.runs.at_mut(run_id).dropped = u32::MAX;
                self.loose.push(run_id);
            }
            made?;
            self.cover(chain, run_id, depth, at, at + added)?;
            (at, depth) = (at + added, depth + added as u32);
        }
        Ok(())
    }

    /// How many of the local hashes are those of the run from a depth on.
    pub(crate) fn common(&self, run: &Run, depth: u32, locals: &[u64]) -> usize {
        let mut offset = depth.wrapping_sub(run.start);
        let most = locals.len().min(run.len.saturating_sub(offset) as usize);
        let mut same = 0;
        while same < most {
            let Some(&chunk) = run.chunks.get((offset / LANES) as usize) else { return same };
            if let Some(&ahead) = run.chunks.get((offset / LANES) as usize + 8) {
                self.chunk_prefetch(ahead);
            }
            let lane = (offset % LANES) as usize;
            let held = self.blocks.chunk(chunk).locals.get(lane..).unwrap_or_default();
            let asked = locals.get(same..most).unwrap_or_default();
            if lane == 0
                && let (Some(held), Some(asked)) = (held.first_chunk::<8>(), asked.first_chunk::<8>())
                && held.iter().zip(asked).fold(0, |differences, (held, asked)| differences | (held ^ asked)) == 0
            {
                same += 8;
                offset += 8;
                continue;
            }
            let equal = held.iter().zip(asked).take_while(|(held, asked)| held == asked).count();
            same += equal;
            offset += equal as u32;
            if equal < held.len().min(asked.len()) {
                return same;
            }
        }
        same
    }

    /// Enters a new run, whose first block is there, into the table of branches.
    fn link(&mut self, id: u32) -> Result<(), Refused> {
        let run = self.runs.at(id);
        if run.len == 0 {
            let run = self.runs.take(id);
            self.heap -= run.heap();
            return Err(Refused::Exhausted);
        }
        let (parent, start) = (run.parent, run.start);
        let hash = branch_hash(self.secret, parent, start, self.blocks.local(run.slot(start)));
        let (secret, runs, blocks) = (self.secret, &self.runs, &self.blocks);
        if !self.branches.insert(hash, id, |id| run_hash(secret, runs, blocks, id)) {
            let run = self.runs.take(id);
            self.heap -= run.heap();
            for chunk in run.chunks {
                self.blocks.pages_mut().free(chunk);
            }
            return Err(Refused::Exhausted);
        }
        if parent != ROOT {
            let above = self.runs.at_mut(parent);
            above.children += 1;
            above.deepest_branch = above.deepest_branch.max(start);
        }
        Ok(())
    }

    /// Adds blocks at a run's end, without engine hashes.
    fn extend(&mut self, run_id: u32, locals: &[u64]) -> Result<(), Refused> {
        let run = self.runs.at_mut(run_id);
        let before = run.heap();
        let chunks = (run.len as usize + locals.len()).div_ceil(LANES as usize);
        run.chunks.reserve_exact(if run.chunks.is_empty() {
            chunks
        } else {
            // An end that grows again and again must not be copied each time.
            let more = chunks.saturating_sub(run.chunks.len());
            if more > run.chunks.capacity() - run.chunks.len() { more.max(run.chunks.len() / 4) } else { 0 }
        });
        let mut rest = locals;
        let mut made = Ok(());
        while !rest.is_empty() {
            let lane = run.len % LANES;
            if lane == 0 {
                let Some(chunk) = self.blocks.allocate(run_id, run.chunks.len() as u16) else {
                    made = Err(Refused::Exhausted);
                    break;
                };
                run.chunks.push(chunk);
            }
            let Some(chunk) = run.chunks.last().and_then(|&chunk| self.blocks.chunk_mut(chunk)) else { break };
            let room = chunk.locals.get_mut(lane as usize..).unwrap_or_default();
            let taken = room.len().min(rest.len());
            for (to, local) in room.iter_mut().zip(rest) {
                *to = *local;
            }
            run.len += taken as u32;
            rest = rest.get(taken..).unwrap_or_default();
        }
        self.heap = self.heap + run.heap() - before;
        made
    }

    /// Lets the chain's rank hold the blocks `from..to` of the chain, which lie in a run from `depth` on.
    fn cover(&mut self, chain: &Chain<'_>, run: u32, depth: u32, from: usize, to: usize) -> Result<(), Refused> {
        let covered = self.cover_all(chain, run, depth, from, to);
        if covered.is_err() {
            self.runs.at_mut(run).dropped = u32::MAX;
            self.loose.push(run);
        }
        covered
    }

    fn cover_all(&mut self, chain: &Chain<'_>, run: u32, depth: u32, from: usize, to: usize) -> Result<(), Refused> {
        let seat = chain.seat;
        let depth_of = |at: usize| depth + (at - from) as u32;
        let mut at = from;
        while at < to {
            let first = at;
            at = self.name_shared(chain, run, depth_of(at), at, to);
            let mut label = SHARED;
            let mut name = Name::Shared;
            if at < to {
                name = self.name(chain, Spot { run, label: SHARED, depth: depth_of(at) }, at);
                if let Name::Shared = name {
                    at += 1;
                }
            }
            if at > first {
                self.hold(seat, run, SHARED, depth_of(first), depth_of(at), chain.counting);
            }
            match name {
                Name::Shared => {}
                Name::Known(known) => {
                    label = known;
                    self.hold(seat, run, label, depth_of(at), depth_of(at) + 1, chain.counting);
                    at += 1;
                }
                Name::Private => {
                    let engine = chain.engines.get(at).copied().unwrap_or_default();
                    let at_depth = depth_of(at);
                    label = self.label_for(seat.rank(), run, at_depth).ok_or(Refused::Exhausted)?;
                    if !self.put_private(label, at_depth, engine) {
                        return Err(Refused::Exhausted);
                    }
                    // Held at once: a label is freed with the last block that is held by it.
                    self.hold(seat, run, label, at_depth, at_depth + 1, chain.counting);
                    at += 1;
                }
            }
            let last = Spot { run, label, depth: depth_of(at) - 1 };
            if let Some(rank) = self.ranks.get_mut(seat.rank()) {
                rank.tail = Some(last);
            }
        }
        Ok(())
    }

    /// Goes on as long as engine hashes are, or can simply become, the shared ones. Returns where it stopped.
    fn name_shared(&mut self, chain: &Chain<'_>, run_id: u32, depth: u32, from: usize, to: usize) -> usize {
        let Some(rank) = self.ranks.get(chain.seat.rank()) else { return from };
        if rank.private > 0 || !rank.floating.is_empty() {
            return from;
        }
        const AHEAD: usize = 12;
        for hash in chain.hashes.iter().take(to).skip(from).take(AHEAD) {
            self.shared.prefetch(*hash);
        }
        let run = self.runs.at(run_id);
        let secret = self.secret;
        let mut at = from;
        let mut offset = depth - run.start;
        while at < to {
            let Some(&chunk_id) = run.chunks.get((offset / LANES) as usize) else { return at };
            let lane = offset % LANES;
            let count = (to - at).min((LANES - lane) as usize);
            let Some((header, chunk)) = self.blocks.both_mut(chunk_id) else { return at };
            let lanes = chunk.engines.iter_mut().skip(lane as usize);
            let asked = chain.engines.iter().zip(chain.hashes).skip(at).take(count);
            let mut named = 0;
            for ((to, (engine, hash)), bit) in
                lanes.zip(asked).zip((0u32..8).map(|shift| 1u8 << shift).skip(lane as usize))
            {
                if header.listed & bit != 0 {
                    if to != engine || header.doubled & bit != 0 {
                        break;
                    }
                } else {
                    if let Some(ahead) = chain.hashes.get(at + named + AHEAD) {
                        self.shared.prefetch(*ahead);
                    }
                    if !self.shared.insert_alone(*hash, slot(chunk_id, lane + named as u32)) {
                        break;
                    }
                    *to = *engine;
                    header.listed |= bit;
                }
                named += 1;
            }
            at += named;
            offset += named as u32;
            if named < count {
                let slot = slot(chunk_id, offset % LANES);
                let (Some(&engine), Some(&hash)) = (chain.engines.get(at), chain.hashes.get(at)) else { return at };
                if self.blocks.header(slot).listed & bit(slot) != 0 {
                    return at;
                }
                let blocks = &self.blocks;
                if self.shared.find(hash, |other| blocks.engine(other) == engine).is_some()
                    || !self.shared.insert(hash, slot, |slot| secret.mix(blocks.engine(slot)))
                {
                    return at;
                }
                self.blocks.set_engine(slot, engine);
                if let Some(header) = self.blocks.header_mut(slot) {
                    header.listed |= bit(slot);
                }
                at += 1;
                offset += 1;
            }
        }
        at
    }

    /// Finds the name under which a rank is to hold a block. Whatever it holds elsewhere under this engine hash moves.
    fn name(&mut self, chain: &Chain<'_>, spot: Spot, at: usize) -> Name {
        let (Some(&engine), Some(&hash)) = (chain.engines.get(at), chain.hashes.get(at)) else { return Name::Private };
        let rank = chain.seat.rank();
        self.land(rank, engine, spot);
        if let Some(held) = self.locate(rank, engine, hash) {
            if (held.run, held.depth) == (spot.run, spot.depth) {
                return if held.label == SHARED { Name::Shared } else { Name::Known(held.label) };
            }
            self.release_everywhere(rank, held);
        }
        let slot = self.runs.at(spot.run).slot(spot.depth);
        if self.blocks.header(slot).listed & bit(slot) != 0 {
            return if self.blocks.engine(slot) == engine { Name::Shared } else { Name::Private };
        }
        let mut equals: [Slot; MAX_EQUAL] = [0; MAX_EQUAL];
        let mut found = 0;
        let blocks = &self.blocks;
        self.shared.find(hash, |other| {
            if blocks.engine(other) == engine {
                if let Some(place) = equals.get_mut(found) {
                    *place = other;
                }
                found += 1;
            }
            found >= MAX_EQUAL
        });
        let secret = self.secret;
        if found >= MAX_EQUAL || !self.shared.insert(hash, slot, |slot| secret.mix(blocks.engine(slot))) {
            return Name::Private;
        }
        self.blocks.set_engine(slot, engine);
        if let Some(header) = self.blocks.header_mut(slot) {
            header.listed |= bit(slot);
            header.doubled = if found > 0 { header.doubled | bit(slot) } else { header.doubled & !bit(slot) };
        }
        for other in equals.into_iter().take(found) {
            if let Some(header) = self.blocks.header_mut(other) {
                header.doubled |= bit(other);
            }
        }
        Name::Shared
    }

    /// A label of a rank that can take an engine hash for the block at a depth.
    fn label_for(&mut self, rank: u32, run_id: u32, depth: u32) -> Option<u32> {
        let run = self.runs.at(run_id);
        for holding in run.of_rank(rank).iter().filter(|holding| holding.label != SHARED) {
            let label = self.labels.at(holding.label);
            let slot = label.slot(depth);
            let inside = label.start <= depth && depth < label.end();
            if (inside && self.label_blocks.header(slot).listed & bit(slot) == 0)
                || (depth == label.end() && label.len < MAX_BLOCKS)
            {
                return Some(holding.label);
            }
        }
        self.labels.add(Label { rank, run: run_id, start: depth, ..Label::default() }, MAX_RECORDS)
    }

    /// Gives a block an engine hash in a label, inside it or at its end.
    fn put_private(&mut self, label_id: u32, depth: u32, engine: u64) -> bool {
        let label = self.labels.at_mut(label_id);
        let before = label.heap();
        if depth == label.end() {
            if label.len >= MAX_BLOCKS {
                return false;
            }
            if label.len.is_multiple_of(LANES) {
                let Some(chunk) = self.label_blocks.allocate(label_id, label.chunks.len() as u16) else {
                    if label.len == 0 {
                        self.labels.take(label_id);
                    }
                    return false;
                };
                label.chunks.push(chunk);
            }
            label.len += 1;
        }
        self.heap = self.heap + label.heap() - before;
        let (rank, slot) = (label.rank, label.slot(depth));
        self.label_blocks.set_engine(slot, engine);
        let hash = private_hash(self.secret, rank, engine);
        let (secret, blocks, labels) = (self.secret, &self.label_blocks, &self.labels);
        if !self.private.insert(hash, slot, |slot| private_slot_hash(secret, blocks, labels, slot)) {
            let run = self.labels.at(label_id).run;
            self.unlist_private(rank, run, label_id, depth, depth);
            return false;
        }
        if let Some(header) = self.label_blocks.header_mut(slot) {
            header.listed |= bit(slot);
        }
        if let Some(rank) = self.ranks.get_mut(rank) {
            rank.private += 1;
        }
        true
    }

    // ---- blocks without known ancestors ----

    /// Takes an engine hash out of the floating blocks of a rank that stores it at a known place. Where the place is the
    /// same, its copies come along.
    fn land(&mut self, rank_slot: u32, engine: u64, spot: Spot) {
        let Some(rank) = self.ranks.get_mut(rank_slot) else { return };
        if rank.floating.is_empty() {
            return;
        }
        let Some(block) = rank.floating.take(engine) else { return };
        let entries = block.copies.iter().filter(|copies| **copies > 0).count() as u64;
        let slow = block.copies.iter().skip(1).filter(|copies| **copies > 0).count() as u64;
        rank.entries -= entries;
        self.entries -= entries;
        self.slow_entries -= slow;
        self.floating -= entries;
        if block.depth != spot.depth || self.sequence_at(spot.run, spot.depth) != block.sequence {
            return;
        }
        // As if each copy were stored again at its place, where the tree now knows it.
        let single = [engine];
        let hashes = [self.secret.mix(engine)];
        for (tier, copies) in (0u32..).zip(block.copies).filter(|(_, copies)| *copies > 0) {
            let seat = Seat::new(rank_slot, tier);
            let chain =
                Chain { seat, counting: Counting::Set, engines: &single, locals: &[block.local], hashes: &hashes };
            if self.cover(&chain, spot.run, spot.depth, 0, 1).is_err() {
                return;
            }
            if let Some(held) = self.locate(rank_slot, engine, self.secret.mix(engine)) {
                self.set_copies(seat, held, copies);
            }
        }
    }

    /// Sets the number of copies of a block that a seat holds.
    pub(crate) fn set_copies(&mut self, seat: Seat, spot: Spot, copies: u32) {
        let key = self.extra(seat.tier(), spot);
        debug_assert!(key >= extra_key(seat.tier(), SHARED, 0));
        if let Some(rank) = self.ranks.get_mut(seat.rank()) {
            if copies > 1 {
                rank.extras.insert(key, copies - 1);
            } else if !rank.extras.is_empty() {
                rank.extras.remove(&key);
            }
        }
    }

    /// Sequence hash of a block of a run.
    pub(crate) fn sequence_at(&self, run_id: u32, depth: u32) -> u64 {
        let run = self.runs.at(run_id);
        let mut hash = self.prefix(run_id);
        for at in run.start..=depth {
            hash = sequence_hash(at, hash, self.blocks.local(run.slot(at)));
        }
        hash
    }

    /// Stores a chain below a floating block.
    fn store_floating(
        &mut self,
        seat: Seat,
        counting: Counting,
        parent: u64,
        engines: &[u64],
        locals: &[u64],
    ) -> Result<(), Refused> {
        let Some(rank) = self.ranks.get(seat.rank()) else { return Err(Refused::UnknownParent) };
        let Some(above) = rank.floating.get(parent).copied() else { return Err(Refused::UnknownParent) };
        let count = u32::try_from(engines.len()).map_err(|_| Refused::Exhausted)?;
        if above.depth.checked_add(count).is_none() {
            return Err(Refused::Malformed("its chain is deeper than 2^32 blocks"));
        }
        let (mut depth, mut sequence) = (above.depth, above.sequence);
        for (&engine, &local) in engines.iter().zip(locals) {
            let before = sequence;
            (depth, sequence) = (depth + 1, sequence_hash(depth + 1, sequence, local));
            let block = FloatingBlock { sequence, parent: Some(before), local, depth, copies: [0; 4] };
            self.float(seat, counting, engine, block);
        }
        self.tidy();
        Ok(())
    }

    /// Adds a copy of a floating block in a seat's tier. What the rank holds elsewhere under this engine hash moves.
    pub(crate) fn float(&mut self, seat: Seat, counting: Counting, engine: u64, block: FloatingBlock) {
        let rank = seat.rank();
        let hash = self.secret.mix(engine);
        let mut block = block;
        if let Some(held) = self.locate(rank, engine, hash) {
            if held.depth == block.depth && self.sequence_at(held.run, held.depth) == block.sequence {
                self.hold(seat, held.run, held.label, held.depth, held.depth + 1, counting);
                return;
            }
            self.release_everywhere(rank, held);
        }
        let Some(rank) = self.ranks.get_mut(rank) else { return };
        if let Some(old) = rank.floating.take(engine) {
            let entries = old.copies.iter().filter(|copies| **copies > 0).count() as u64;
            let slow = old.copies.iter().skip(1).filter(|copies| **copies > 0).count() as u64;
            rank.entries -= entries;
            self.entries -= entries;
            self.slow_entries -= slow;
            self.floating -= entries;
            if (old.sequence, old.depth) == (block.sequence, block.depth) {
                block.copies = old.copies;
                block.parent = block.parent.or(old.parent);
            }
        }
        if let Some(copies) = block.copies.get_mut(seat.tier() as usize) {
            *copies = if counting == Counting::Set { 1 } else { copies.saturating_add(1) };
        }
        let entries = block.copies.iter().filter(|copies| **copies > 0).count() as u64;
        let slow = block.copies.iter().skip(1).filter(|copies| **copies > 0).count() as u64;
        rank.floating.add(engine, block);
        rank.entries += entries;
        self.entries += entries;
        self.slow_entries += slow;
        self.floating += entries;
    }
}

/// A chain that is being stored.
struct Chain<'a> {
    seat: Seat,
    counting: Counting,
    engines: &'a [u64],
    locals: &'a [u64],
    hashes: &'a [u64],
}
