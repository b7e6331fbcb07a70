//! The blocks of one rank, and the numbered events that led to them.

use std::collections::HashSet;
use std::sync::Arc;

use super::blocks::{Block, Error, Notes, NumberedEvent, Scope, part_hashes, tier_index};
use super::chunks::StateSnapshot;
use super::table::BlockTable;
use crate::hash;
use crate::wire::{BlockRecord, TIERS, Writer};

/// Maximum number of blocks in one event: 128 KiB of hashes, so that events fill batches of 512 KiB well.
pub const MAX_EVENT_BLOCKS: usize = 8192;

/// Blocks, digest and event numbers of one rank in one incarnation.
pub struct RankState {
    pub incarnation: u64,
    /// Id of the next event.
    pub next_event_id: u64,
    /// Blocks reported as removed that were not resident in that tier; such removals are not published.
    pub unknown_removals: u64,
    /// Blocks reported as copied to a tier that could not be placed; they are not published.
    pub unplaced_blocks: u64,
    blocks: BlockTable,
    before: (u64, u64, u64),
}

impl RankState {
    /// `counted` says whether each copy is stored and removed by itself.
    pub fn new(incarnation: u64, counted: bool) -> Self {
        Self {
            incarnation,
            next_event_id: 0,
            unknown_removals: 0,
            unplaced_blocks: 0,
            blocks: BlockTable::new(counted),
            before: (0, 0, 0),
        }
    }

    /// Returns the number of resident blocks, in any tier.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sum of the digest terms of all blocks, as KvEventBatch.digest defines it.
    pub fn digest(&self) -> u64 {
        self.blocks.digest
    }

    /// Returns a resident block.
    pub fn get(&self, engine_hash: u64) -> Option<&Block> {
        self.blocks.get(engine_hash)
    }

    /// Yields (engine hash, block) of all blocks, in any order.
    pub fn blocks(&self) -> impl Iterator<Item = (u64, &Block)> {
        self.blocks.iter()
    }

    /// Returns whether a block is resident in a tier.
    pub fn is_resident(&self, engine_hash: u64, tier: i32) -> Result<bool, Error> {
        let index = tier_index(tier)?;
        Ok(self.get(engine_hash).and_then(|block| block.copies.get(index)).is_some_and(|copies| *copies > 0))
    }

    /// Returns the number of physical copies of all blocks in device memory.
    pub fn device_copies(&self) -> u64 {
        self.blocks.copies.first().copied().unwrap_or_default()
    }

    /// Returns the engine hashes of a chunk of blocks that ends with this one, in order.
    ///
    /// Blocks that are not resident, and those before them, are missing. A block that consists of parts is a chunk by
    /// itself.
    pub fn chunk(&self, engine_hash: u64, blocks: usize) -> Vec<u64> {
        let mut found = Vec::new();
        let mut place = Some(engine_hash);
        while let Some((engine_hash, block)) = place.and_then(|place| Some((place, self.blocks.get(place)?)))
            && found.len() < blocks
        {
            found.push(engine_hash);
            place = block.parent.filter(|_| block.parts() <= 1 && self.has_parent(block));
        }
        found.reverse();
        found
    }

    /// Records a chain of blocks below `parent`, or at the start of a sequence if it is None.
    ///
    /// `locals` has `parts` local hashes for each engine hash: an engine's block may consist of several blocks. Without
    /// `new_copies` blocks that are resident in the tier already stay as they are. Returns the resulting events.
    #[allow(clippy::too_many_arguments)] // one report of an engine, as it comes
    pub fn stored(
        &mut self,
        engine_hashes: &[u64],
        locals: &[u64],
        parent: Option<u64>,
        tier: i32,
        scope: Option<Arc<Scope>>,
        new_copies: bool,
        parts: u32,
    ) -> Result<Vec<NumberedEvent>, Error> {
        let index = tier_index(tier)?;
        if engine_hashes.iter().collect::<HashSet<_>>().len() != engine_hashes.len() {
            return Err(Error::Invalid("expected each engine hash once in a chain, received one twice".into()));
        }
        let hashes: Vec<u64> = engine_hashes.iter().flat_map(|engine_hash| part_hashes(*engine_hash, parts)).collect();
        if locals.len() != hashes.len() {
            return Err(Error::Invalid(format!(
                "expected 8 bytes of local hashes per block ({}), received {} bytes",
                hashes.len(),
                locals.len() * 8
            )));
        }
        let (mut parent, mut place, mut depth) = match parent {
            _ if hashes.is_empty() => return Ok(Vec::new()),
            None => (None, 0, 0),
            Some(parent) if hashes.contains(&parent) => {
                let message = "expected a parent outside of the stored blocks, received one of them";
                return Err(Error::Invalid(message.into()));
            }
            Some(parent) => {
                let above = self.blocks.get(parent).ok_or(Error::UnknownParent(parent))?;
                (Some(parent), above.sequence, above.depth.saturating_add(1))
            }
        };
        let (notes, notes_of_last) = (Notes::new(scope.clone(), 1), Notes::new(scope, parts));
        let mut blocks = Vec::with_capacity(hashes.len());
        for (number, (engine_hash, local)) in hashes.iter().zip(locals).enumerate() {
            let sequence = if parent.is_none() { *local } else { hash::chain(place, *local) };
            let notes = if (number + 1) % parts.max(1) as usize == 0 { &notes_of_last } else { &notes };
            let (copies, notes) = (first_copy(index), notes.clone());
            let block = Block { parent, parent_place: place, local: *local, sequence, depth, copies, notes };
            blocks.push((*engine_hash, block));
            (parent, place, depth) = (Some(*engine_hash), sequence, depth.saturating_add(1));
        }
        Ok(self.store_chains(blocks, index, tier, new_copies))
    }

    /// Records that resident blocks are now in `tier` too. Returns the resulting events.
    ///
    /// Blocks that are not resident, or whose parents are not, are counted in `unplaced_blocks` and not published: the
    /// index could not place them.
    pub fn stored_in_tier(&mut self, engine_hashes: &[u64], tier: i32) -> Result<Vec<NumberedEvent>, Error> {
        let index = tier_index(tier)?;
        let mut blocks = Vec::new();
        for engine_hash in engine_hashes.iter().flat_map(|engine_hash| self.parts_of(*engine_hash)).collect::<Vec<_>>()
        {
            match self.blocks.get(engine_hash) {
                Some(block) if self.has_parent(block) => {
                    blocks.push((engine_hash, Block { copies: first_copy(index), ..block.clone() }));
                }
                _ => self.unplaced_blocks += 1,
            }
        }
        Ok(self.store_chains(blocks, index, tier, true))
    }

    /// Records that blocks, or one physical copy of each, left a tier, in any order. Returns the resulting events.
    ///
    /// Blocks that are not resident there are counted and not published.
    pub fn removed(&mut self, engine_hashes: &[u64], tier: i32) -> Result<Vec<NumberedEvent>, Error> {
        let index = tier_index(tier)?;
        let mut events = Vec::new();
        let (mut gone, mut named) = (Vec::new(), HashSet::new());
        for engine_hash in engine_hashes.iter().flat_map(|engine_hash| self.parts_of(*engine_hash)).collect::<Vec<_>>()
        {
            // A repeated hash means two copies, which need two events.
            if named.contains(&engine_hash) || gone.len() == MAX_EVENT_BLOCKS {
                events.push(self.removed_event(&gone, tier));
                gone.clear();
                named.clear();
            }
            if self.blocks.remove(engine_hash, index) {
                gone.push(engine_hash);
                named.insert(engine_hash);
            } else {
                self.unknown_removals += 1;
            }
        }
        if !gone.is_empty() {
            events.push(self.removed_event(&gone, tier));
        }
        Ok(events)
    }

    /// Records that all blocks left a tier, or every tier for 0. Returns the resulting event.
    pub fn cleared(&mut self, tier: i32) -> Result<NumberedEvent, Error> {
        if tier == 0 {
            self.blocks.clear_all();
        } else {
            self.blocks.clear(tier_index(tier)?);
        }
        Ok(self.numbered(tier, 5, &[]))
    }

    /// Adds blocks of a dump with `total` blocks, parents before children.
    pub fn load(&mut self, next_event_id: u64, records: &[BlockRecord], total: usize) {
        self.next_event_id = next_event_id;
        self.blocks.reserve(total.saturating_sub(self.blocks.len()));
        for record in records {
            let place = record.parent.and_then(|parent| self.blocks.get(parent)).map_or(0, |above| above.sequence);
            let mut copies = [0; TIERS];
            for (tier, count) in record.copies.iter() {
                if let Some(to) = tier_index(tier).ok().and_then(|index| copies.get_mut(index)) {
                    *to = count;
                }
            }
            let block = Block {
                parent: record.parent,
                parent_place: place,
                local: record.local,
                sequence: record.sequence,
                depth: record.depth,
                copies,
                notes: None,
            };
            self.blocks.add(record.engine, block);
        }
    }

    /// Sets scope and parts of a resident block, which its record does not have. Others are ignored.
    pub fn annotate(&mut self, engine_hash: u64, scope: Option<Arc<Scope>>, parts: u32) {
        if let Some(block) = self.blocks.get(engine_hash) {
            let block = Block { notes: Notes::new(scope, parts), ..block.clone() };
            self.blocks.replace(engine_hash, block);
        }
    }

    /// Begins changes that `roll_back` can undo.
    pub fn begin(&mut self) {
        self.before = (self.next_event_id, self.unknown_removals, self.unplaced_blocks);
        self.blocks.begin();
    }

    /// Ends changes, which stay.
    pub fn commit(&mut self) {
        self.blocks.commit();
    }

    /// Undoes all changes since `begin`.
    pub fn roll_back(&mut self) {
        (self.next_event_id, self.unknown_removals, self.unplaced_blocks) = self.before;
        self.blocks.roll_back();
    }

    /// Returns the state as of now, from which its chunks are encoded later. `counting` is the CopyCounting of the rank.
    pub fn snapshot(&self, counting: i32) -> StateSnapshot {
        let blocks = self.blocks.iter().map(|(engine_hash, block)| (engine_hash, block.clone())).collect();
        StateSnapshot::new(self.incarnation, self.next_event_id, self.digest(), counting, blocks)
    }

    /// Stores blocks, and returns an event for each run of blocks that follow each other.
    fn store_chains(
        &mut self,
        blocks: Vec<(u64, Block)>,
        index: usize,
        tier: i32,
        new_copies: bool,
    ) -> Vec<NumberedEvent> {
        let mut events = Vec::new();
        let mut run = Run::default();
        for (engine_hash, block) in blocks {
            let follows = block.parent.is_some() && block.parent == run.engines.last().copied();
            if !run.engines.is_empty() && (!follows || run.engines.len() == MAX_EVENT_BLOCKS) {
                events.push(self.stored_event(&run, tier));
                run = Run::default();
            }
            let is_resident = self.blocks.get(engine_hash).is_some_and(|resident| {
                resident.sequence == block.sequence && resident.copies.get(index).is_some_and(|copies| *copies > 0)
            });
            if !new_copies && is_resident {
                continue;
            }
            if run.engines.is_empty() {
                run.parent = block.parent;
            }
            run.engines.push(engine_hash);
            run.locals.push(block.local);
            self.blocks.store(engine_hash, block, index);
        }
        if !run.engines.is_empty() {
            events.push(self.stored_event(&run, tier));
        }
        events
    }

    fn stored_event(&mut self, run: &Run, tier: i32) -> NumberedEvent {
        let mut stored = Writer::default();
        if let Some(parent) = run.parent {
            stored.fixed64(1, parent);
        }
        stored.packed_fixed64(2, run.engines.iter().copied());
        stored.packed_fixed64(3, run.locals.iter().copied());
        self.numbered(tier, 3, &stored.0)
    }

    fn removed_event(&mut self, engine_hashes: &[u64], tier: i32) -> NumberedEvent {
        let mut removed = Writer::default();
        removed.packed_fixed64(1, engine_hashes.iter().copied());
        self.numbered(tier, 4, &removed.0)
    }

    /// Returns the next event, with a change in the given field.
    fn numbered(&mut self, tier: i32, field: u32, change: &[u8]) -> NumberedEvent {
        let id = self.next_event_id;
        self.next_event_id += 1;
        let mut event = Writer::default();
        event.varint(1, id);
        event.varint(2, tier as u64);
        event.bytes(field, change);
        NumberedEvent { id, encoded: event.0.into(), digest: self.digest() }
    }

    /// Returns the engine hashes of the blocks that an engine's block consists of.
    fn parts_of(&self, engine_hash: u64) -> impl Iterator<Item = u64> + use<> {
        part_hashes(engine_hash, self.blocks.get(engine_hash).map_or(1, Block::parts))
    }

    fn has_parent(&self, block: &Block) -> bool {
        let Some(parent) = block.parent else { return true };
        self.blocks.get(parent).is_some_and(|above| above.sequence == block.parent_place)
    }
}

/// Blocks of one event.
#[derive(Default)]
struct Run {
    parent: Option<u64>,
    engines: Vec<u64>,
    locals: Vec<u64>,
}

fn first_copy(index: usize) -> [u32; TIERS] {
    let mut copies = [0; TIERS];
    if let Some(first) = copies.get_mut(index) {
        *first = 1;
    }
    copies
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Batch, Change};

    #[test]
    fn a_rejected_report_changes_nothing() {
        let mut state = RankState::new(1, true);
        assert!(state.stored(&[1, 1], &[5, 6], None, 1, None, true, 1).is_err());
        assert!(state.stored(&[1], &[5, 6], None, 1, None, true, 1).is_err());
        assert!(state.stored(&[1], &[5], Some(1), 1, None, true, 1).is_err());
        assert!(state.stored(&[1], &[5], None, 9, None, true, 1).is_err());
        assert_eq!(state.stored(&[1], &[5], Some(7), 1, None, true, 1), Err(Error::UnknownParent(7)));
        assert_eq!((state.next_event_id, state.digest(), state.len()), (0, 0, 0));
    }

    #[test]
    fn the_last_of_several_copies_removes_the_block() {
        let mut state = RankState::new(1, true);
        for _ in 0..2 {
            state.stored(&[1, 2], &[5, 6], None, 1, None, true, 1).unwrap();
        }
        assert_eq!(state.removed(&[1, 2, 1, 2], 1).unwrap().len(), 2);
        assert_eq!((state.len(), state.digest(), state.unknown_removals), (0, 0, 0));
        assert!(state.removed(&[1], 1).unwrap().is_empty());
        assert_eq!(state.unknown_removals, 1);
    }

    #[test]
    fn long_chains_are_split_and_stay_chains() {
        let mut state = RankState::new(1, true);
        let hashes: Vec<u64> = (1..=2 * MAX_EVENT_BLOCKS as u64).collect();
        let events = state.stored(&hashes, &hashes, None, 1, None, true, 1).unwrap();
        assert_eq!(events.len(), 2);
        let mut batch = Writer::default();
        batch.bytes(4, &events[1].encoded);
        let batch = Batch::parse(&batch.0).unwrap();
        let Change::Stored { parent, engines, .. } = &batch.events[0].change else { panic!() };
        assert_eq!((*parent, engines.len()), (Some(MAX_EVENT_BLOCKS as u64), MAX_EVENT_BLOCKS));
    }

    #[test]
    fn changes_can_be_undone() {
        let mut state = RankState::new(1, false);
        state.stored(&[1, 2], &[5, 6], None, 1, None, true, 1).unwrap();
        let before = (state.digest(), state.next_event_id, state.len());
        state.begin();
        state.stored(&[3], &[7], Some(2), 2, None, true, 1).unwrap();
        state.removed(&[1], 1).unwrap();
        state.cleared(0).unwrap();
        state.stored(&[1], &[9], None, 1, None, true, 1).unwrap();
        state.roll_back();
        assert_eq!((state.digest(), state.next_event_id, state.len()), before);
        assert!(state.is_resident(1, 1).unwrap());
    }
}
