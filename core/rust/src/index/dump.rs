//! Computes the digest of a rank, dumps its state and loads it.

use std::collections::HashMap;
use std::sync::PoisonError;

use crate::hash::{ByEngineHash, digest_term, sequence_hash};
use crate::index::Index;
use crate::index::apply::Summary;
use crate::index::orphans::OrphanBlock;
use crate::index::tree::nodes::RankTier;
use crate::index::tree::ranks::{BlockPosition, Counting, Name, Rank};
use crate::wire::{BlockRecord, Malformed, RankState, TIERS, Writer};

/// Blocks between two moments at which other threads may have the processor. The kernel would let a thread that wakes,
/// such as one that answers queries, wait for milliseconds until this one has used up its time.
const BLOCKS_PER_TURN: usize = 8192;

/// A block of a rank, as the walk over all blocks visits it.
struct Block {
    position: BlockPosition,
    engine: u64,
    local: u64,
    sequence: u64,
    /// Sequence hash of its parent; 0 at depth 0.
    above: u64,
    /// Number of copies in each tier.
    copies: [u32; TIERS],
}

impl Index {
    /// Calls `visit` with every block of a rank that is in the tree, ancestors before descendants. Yields the processor
    /// at times.
    fn for_blocks(&self, slot: u32, mut visit: impl FnMut(Block)) {
        let Some(rank) = self.ranks.get(slot) else { return };
        let mut blocks = 0;
        // A node starts deeper than the node it branches off.
        let mut nodes: Vec<(u32, u32)> =
            rank.residencies.iter().map(|resident| (self.nodes.at(resident.node).start, resident.node)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        for (start, id) in nodes {
            let node = self.nodes.at(id);
            let of_rank = node.of_rank(slot);
            let mut aliases: Vec<u32> = of_rank.iter().map(|range| range.alias).collect();
            aliases.sort_unstable();
            aliases.dedup();
            let end = of_rank.iter().map(|range| range.hi).max().unwrap_or(start);
            let mut sequence = self.prefix(id);
            for depth in start..end {
                let at = node.slot(depth);
                let local = self.blocks.local(at);
                let above = sequence;
                sequence = sequence_hash(depth, above, local);
                for &alias in &aliases {
                    let position = BlockPosition { node: id, alias, depth };
                    let mut copies = [0; TIERS];
                    for range in of_rank.iter().filter(|range| range.alias == alias) {
                        if self.has(node, range, depth)
                            && let Some(to) = copies.get_mut(range.rank_tier.tier() as usize)
                        {
                            *to = self.copies(rank, range.rank_tier.tier(), position);
                        }
                    }
                    if copies != [0; TIERS] {
                        let engine = self.engine_at(position).unwrap_or_default();
                        visit(Block { position, engine, local, sequence, above, copies });
                    }
                }
                blocks += 1;
                if blocks == BLOCKS_PER_TURN {
                    blocks = 0;
                    std::thread::yield_now();
                }
            }
        }
    }

    /// Returns the digest of the entries of a slot's rank: again the last one if no rank has changed since.
    pub fn digest(&self, slot: u32) -> u64 {
        let Some(rank) = self.ranks.get(slot) else { return 0 };
        let mut last = rank.digest.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((changes, digest)) if changes == self.changes => digest,
            _ => last.insert((self.changes, self.compute_digest(slot, rank))).1,
        }
    }

    /// Returns whether `digest` need not compute the digest of a rank again.
    pub fn knows_digest(&self, name: Name) -> bool {
        let rank = self.ranks.slot_of(name).and_then(|slot| self.ranks.get(slot));
        let last = rank.and_then(|rank| *rank.digest.lock().unwrap_or_else(PoisonError::into_inner));
        last.is_some_and(|(changes, _)| changes == self.changes)
    }

    fn compute_digest(&self, slot: u32, rank: &Rank) -> u64 {
        let mut digest = 0u64;
        let mut add = |engine: u64, sequence: u64, copies: &[u32; TIERS]| {
            for (tier, copies) in (1u32..).zip(copies).filter(|(_, copies)| **copies > 0) {
                digest = digest.wrapping_add(digest_term(engine, sequence, tier, *copies));
            }
        };
        self.for_blocks(slot, |block| add(block.engine, block.sequence, &block.copies));
        for (engine, block) in rank.orphans.iter() {
            add(engine, block.sequence, &block.copies);
        }
        digest
    }

    /// Returns the digest of a rank's entries; None if it is unknown.
    pub fn digest_of(&self, name: Name) -> Option<u64> {
        self.ranks.slot_of(name).map(|slot| self.digest(slot))
    }

    /// Returns encoded RankState chunks of a rank; none if it is unknown.
    pub fn dump(&self, name: Name, chunk_blocks: usize) -> Vec<Vec<u8>> {
        let Some(slot) = self.ranks.slot_of(name) else { return Vec::new() };
        let Some(rank) = self.ranks.get(slot) else { return Vec::new() };
        let chunk_blocks = chunk_blocks.max(1);
        let mut records = Vec::new();
        let mut starts = Vec::new();
        let mut digest = 0u64;
        let mut count = 0usize;
        let mut write = |record: Record| {
            if count.is_multiple_of(chunk_blocks) {
                starts.push(records.len());
            }
            count += 1;
            for (tier, copies) in (1u32..).zip(record.copies).filter(|(_, copies)| *copies > 0) {
                digest = digest.wrapping_add(digest_term(record.engine, record.sequence, tier, copies));
            }
            record.encode(&mut records);
        };
        if rank.orphans.is_empty() {
            let mut last: Option<(BlockPosition, u64)> = None;
            self.for_blocks(slot, |block| {
                let parent = match last {
                    Some((position, engine))
                        if position.node == block.position.node && position.depth + 1 == block.position.depth =>
                    {
                        Some(engine)
                    }
                    _ => self.parent_engine(slot, block.position),
                };
                last = Some((block.position, block.engine));
                write(Record::of(&block, parent));
            });
        } else {
            self.dump_with_orphans(slot, rank, &mut write);
        }
        let mut chunks = Vec::with_capacity(starts.len().max(1));
        starts.push(records.len());
        if starts.len() == 1 {
            starts.push(records.len());
        }
        let pieces = starts.len() - 1;
        for (number, bounds) in starts.windows(2).enumerate() {
            let [from, to] = bounds else { continue };
            let mut state = Writer(Vec::with_capacity(to - from + 64));
            let mut message = Writer::default();
            message.varint(1, name.0);
            message.varint(2, u64::from(name.1));
            state.bytes(1, &message.0);
            let mut message = Writer::default();
            message.fixed64(1, rank.incarnation);
            message.varint(2, rank.next_event_id);
            state.bytes(2, &message.0);
            state.0.extend_from_slice(records.get(*from..*to).unwrap_or_default());
            state.varint(4, u64::from(number + 1 == pieces));
            state.fixed64(5, digest);
            state.varint(6, if rank.counting == Counting::Set { 2 } else { 1 });
            state.varint(7, u64::from(rank.partial()));
            chunks.push(state.0);
        }
        chunks
    }

    /// Returns an engine hash of the rank for the parent of a block, if the parent is resident.
    fn parent_engine(&self, slot: u32, position: BlockPosition) -> Option<u64> {
        let depth = position.depth.checked_sub(1)?;
        let node = self.nodes.at(position.node);
        let above = if depth >= node.start { position.node } else { node.parent };
        let node = self.nodes.at(above);
        let range = node.of_rank(slot).iter().find(|range| self.has(node, range, depth))?;
        self.engine_at(BlockPosition { node: above, alias: range.alias, depth })
    }

    fn dump_with_orphans(&self, slot: u32, rank: &Rank, write: &mut impl FnMut(Record)) {
        let mut records = Vec::new();
        let mut at_place: HashMap<(u32, u64), u64> = HashMap::new();
        self.for_blocks(slot, |block| {
            let above = block.position.depth.checked_sub(1).map(|depth| (depth, block.above));
            at_place.insert((block.position.depth, block.sequence), block.engine);
            records.push((block.position.depth, above, Record::of(&block, None)));
        });
        for (engine, block) in rank.orphans.iter() {
            at_place.insert((block.depth, block.sequence), engine);
            let above = block.depth.checked_sub(1).zip(block.parent);
            let OrphanBlock { sequence, local, depth, copies, .. } = *block;
            records.push((depth, above, Record { engine, parent: None, local, sequence, depth, copies }));
        }
        records.sort_by_key(|(depth, ..)| *depth);
        for (_, above, record) in records {
            let parent = above.and_then(|above| at_place.get(&above).copied());
            write(Record { parent, ..record });
        }
    }

    /// Replaces a rank by a dump. Returns the number of its entries.
    pub fn load(&mut self, chunks: &[Vec<u8>]) -> Result<u64, String> {
        self.replace(&Dump::parse(chunks)?)
    }

    /// Replaces a rank by a valid dump. Returns the number of its entries.
    pub(crate) fn replace(&mut self, dump: &Dump) -> Result<u64, String> {
        let slot = match self.ranks.slot_of(dump.name) {
            Some(slot) => slot,
            None => self.rank_slot(dump.name, dump.cursor.0).ok_or("the index has its maximum number of ranks")?,
        };
        self.drop_resident(slot, None);
        if let Some(rank) = self.ranks.get_mut(slot) {
            *rank = Rank {
                missing: dump.partial,
                counting: dump.counting,
                ..Rank::new(dump.name, dump.cursor.0, dump.cursor.1)
            };
        }
        self.load_blocks(slot, dump);
        self.make_room(slot, &mut Summary::default());
        self.ranks.weigh(slot);
        self.scratch.trim();
        self.give_back(true);
        Ok(self.ranks.get(slot).map_or(0, |rank| rank.entries))
    }

    /// Stores the blocks of a dump for an empty rank, in chains of blocks with the same tiers and copies.
    fn load_blocks(&mut self, slot: u32, dump: &Dump) {
        let mut rest = dump.blocks.as_slice();
        while let Some(first) = rest.first() {
            let follows = |pair: &[LoadedBlock]| matches!(pair, [one, two] if two.parent == Some(one.engine) && two.copies == one.copies && !two.orphan);
            let mut length = 1;
            if !first.orphan {
                length += rest.windows(2).take_while(|pair| follows(pair)).count();
            }
            // No longer than an event, so that buffers stay small.
            let (chain, others) = rest.split_at_checked(length.min(4096)).unwrap_or((rest, &[]));
            rest = others;
            for (tier, copies) in (0u32..).zip(first.copies).filter(|(_, copies)| *copies > 0) {
                let rank_tier = RankTier::new(slot, tier);
                if first.orphan {
                    let LoadedBlock { engine, sequence, local, depth, above, .. } = *first;
                    let block = OrphanBlock { sequence, parent: above, local, depth, copies: [0; TIERS] };
                    self.add_orphan(rank_tier, Counting::Counted, engine, block);
                    if let Some(block) = self.ranks.get_mut(slot).and_then(|rank| rank.orphans.get_mut(engine))
                        && let Some(to) = block.copies.get_mut(tier as usize)
                    {
                        *to = copies;
                    }
                    continue;
                }
                let engines: Vec<u64> = chain.iter().map(|block| block.engine).collect();
                let locals: Vec<u64> = chain.iter().map(|block| block.local).collect();
                let checked = self.check_chain(first.parent, &engines, &locals);
                if checked.and_then(|()| self.store(rank_tier, Counting::Set, first.parent, &engines, &locals)).is_err()
                {
                    self.evict(slot);
                    return;
                }
                if copies > 1 {
                    for engine in engines {
                        if let Some(position) = self.locate(slot, engine, self.secret.mix(engine)) {
                            self.set_copies(rank_tier, position, copies);
                        }
                    }
                }
            }
        }
    }
}

/// The content of a BlockRecord.
struct Record {
    engine: u64,
    parent: Option<u64>,
    local: u64,
    sequence: u64,
    depth: u32,
    copies: [u32; TIERS],
}

impl Record {
    fn of(block: &Block, parent: Option<u64>) -> Self {
        let Block { position, engine, local, sequence, copies, .. } = *block;
        Self { engine, parent, local, sequence, depth: position.depth, copies }
    }

    /// Appends the record to an encoded RankState.
    fn encode(&self, to: &mut Vec<u8>) {
        let mut message = Writer(Vec::with_capacity(64));
        message.fixed64(1, self.engine);
        if let Some(parent) = self.parent {
            message.fixed64(2, parent);
        }
        message.fixed64(3, self.local);
        message.fixed64(4, self.sequence);
        message.varint(5, u64::from(self.depth));
        for (tier, copies) in (1u64..).zip(self.copies).filter(|(_, copies)| *copies > 0) {
            let mut in_tier = Writer(Vec::with_capacity(8));
            in_tier.varint(1, tier);
            in_tier.varint(2, u64::from(copies));
            message.bytes(6, &in_tier.0);
        }
        let mut field = Writer(std::mem::take(to));
        field.bytes(3, &message.0);
        *to = field.0;
    }
}

/// A valid dump.
pub struct Dump {
    name: Name,
    cursor: (u64, u64),
    counting: Counting,
    partial: bool,
    blocks: Vec<LoadedBlock>,
}

struct LoadedBlock {
    engine: u64,
    parent: Option<u64>,
    /// Sequence hash of the parent, if there is one.
    above: Option<u64>,
    local: u64,
    sequence: u64,
    depth: u32,
    copies: [u32; TIERS],
    /// Whether the ancestors of the block are unknown.
    orphan: bool,
}

impl Dump {
    /// Parses the chunks of a dump and validates them.
    pub(crate) fn parse(chunks: &[impl AsRef<[u8]>]) -> Result<Self, String> {
        let mut dump: Option<Self> = None;
        let count = chunks.iter().map(|chunk| RankState::count_blocks(chunk.as_ref())).sum();
        let mut known: Known = ByEngineHash::with_capacity_and_hasher(count, Default::default());
        let mut digest = 0u64;
        let mut said = None;
        for chunk in chunks {
            if said.is_some() {
                return Err("a chunk follows the last one".into());
            }
            let state = RankState::parse(chunk.as_ref())
                .map_err(|Malformed(why)| format!("a chunk cannot be parsed: {why}"))?;
            let (Some(name), Some(cursor)) = (state.rank, state.cursor) else {
                return Err("a chunk has no rank or no cursor".into());
            };
            let dump = dump.get_or_insert_with(|| Self {
                name,
                cursor,
                counting: Counting::Counted,
                partial: false,
                blocks: Vec::with_capacity(count),
            });
            if dump.name != name || dump.cursor != cursor {
                return Err("the chunks differ in rank or cursor".into());
            }
            for record in &state.blocks {
                let block = LoadedBlock::check(record, &known)?;
                if known.insert(block.engine, (block.sequence, block.depth, block.orphan)).is_some() {
                    return Err(format!("engine hash {:#x} appears twice", block.engine));
                }
                for (tier, copies) in (1u32..).zip(block.copies).filter(|(_, copies)| *copies > 0) {
                    digest = digest.wrapping_add(digest_term(block.engine, block.sequence, tier, copies));
                }
                dump.blocks.push(block);
            }
            if state.last {
                said = Some(state.digest);
                dump.counting = if state.counting == 2 { Counting::Set } else { Counting::Counted };
                dump.partial = state.partial;
            }
        }
        match (dump, said) {
            (Some(dump), Some(said)) if said == digest => Ok(dump),
            (Some(_), Some(said)) => Err(format!("expected digest {said:#x}, received blocks with digest {digest:#x}")),
            _ => Err("the last chunk is missing".into()),
        }
    }
}

/// Sequence hash and depth of the blocks before, and whether they are orphans.
type Known = ByEngineHash<(u64, u32, bool)>;

impl LoadedBlock {
    fn check(record: &BlockRecord, known: &Known) -> Result<Self, String> {
        let BlockRecord { engine, parent, local, sequence, depth, .. } = *record;
        let wrong = |why: &str| Err(format!("block {engine:#x} {why}"));
        let mut copies = [0; TIERS];
        for (tier, count) in record.copies.iter() {
            let tier = if tier == 0 { 1 } else { tier };
            let place = usize::try_from(tier).ok().and_then(|tier| copies.get_mut(tier.wrapping_sub(1)));
            match place {
                Some(place) if *place == 0 && count > 0 => *place = count,
                Some(_) => return wrong("has a tier twice or a tier without copies"),
                None => return wrong("is in an unknown tier"),
            }
        }
        if copies == [0; TIERS] {
            return wrong("has no copies");
        }
        let (above, orphan) = match parent {
            Some(parent) => {
                let Some(&(above, parent_depth, orphan)) = known.get(&parent) else {
                    return wrong("appears before its parent");
                };
                let right =
                    parent_depth.checked_add(1) == Some(depth) && sequence == sequence_hash(depth, above, local);
                if !right {
                    return wrong("has another depth or sequence hash than follows from its parent and local hash");
                }
                (Some(above), orphan)
            }
            None if depth == 0 && sequence != local => {
                return wrong("has another sequence hash than follows from its local hash");
            }
            None => (None, depth > 0),
        };
        Ok(Self { engine, parent, above, local, sequence, depth, copies, orphan })
    }
}
