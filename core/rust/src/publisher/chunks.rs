//! Encodes a rank's state in chunks, as consumers fetch it and snapshots keep it.

use super::blocks::Block;
use crate::hash::ByEngineHash;
use crate::wire::Writer;

/// Number of blocks in one chunk of a state.
pub const CHUNK_BLOCKS: usize = 4096;

/// A rank's state at one moment. Later changes of the rank do not affect it.
pub struct StateSnapshot {
    incarnation: u64,
    next_event_id: u64,
    digest: u64,
    counting: i32,
    blocks: Vec<(u64, Block)>,
}

impl StateSnapshot {
    /// `counting` is the CopyCounting of the rank.
    pub fn new(incarnation: u64, next_event_id: u64, digest: u64, counting: i32, blocks: Vec<(u64, Block)>) -> Self {
        Self { incarnation, next_event_id, digest, counting, blocks }
    }

    /// Returns the encoded GetRankStateResponses, chain after chain, parents before children; at least one.
    ///
    /// A parent is included only if it is still resident at the position that it had when its child was stored.
    pub fn into_chunks(self, chunk_blocks: usize) -> impl Iterator<Item = Vec<u8>> {
        self.encoded(chunk_blocks, None)
    }

    /// Returns the same as encoded RankState messages of a rank, given by worker id and data-parallel rank. `partial` says
    /// whether blocks may be missing.
    pub fn into_dump(self, rank: (u64, u32), partial: bool, chunk_blocks: usize) -> impl Iterator<Item = Vec<u8>> {
        self.encoded(chunk_blocks, Some((rank, partial)))
    }

    /// Sorts when the first chunk is read: whoever holds a lock while it takes a snapshot waits for a copy only.
    fn encoded(self, chunk_blocks: usize, dump: Option<((u64, u32), bool)>) -> impl Iterator<Item = Vec<u8>> {
        let Self { incarnation, next_event_id, digest, counting, mut blocks } = self;
        let chunk_blocks = chunk_blocks.max(1);
        let count = blocks.len().div_ceil(chunk_blocks).max(1);
        let mut sorted = None;
        (0..count).map(move |number| {
            let (places, blocks) = sorted.get_or_insert_with(|| in_chains(std::mem::take(&mut blocks)));
            let mut chunk = Writer::default();
            // The fields of RankState are those of GetRankStateResponse after the rank.
            let shift = u32::from(dump.is_some());
            if let Some(((worker_id, dp_rank), _)) = dump {
                let mut rank = Writer::default();
                rank.varint(1, worker_id);
                rank.varint(2, dp_rank.into());
                chunk.bytes(1, &rank.0);
            }
            let mut cursor = Writer::default();
            if incarnation != 0 {
                cursor.fixed64(1, incarnation);
            }
            cursor.varint(2, next_event_id);
            chunk.bytes(1 + shift, &cursor.0);
            for (engine_hash, block) in blocks.iter().skip(number * chunk_blocks).take(chunk_blocks) {
                let parent = block.parent.filter(|parent| is_at(places, *parent, block));
                chunk.bytes(2 + shift, &encode_record(*engine_hash, block, parent));
            }
            chunk.varint(3 + shift, u64::from(number + 1 == count));
            if digest != 0 {
                chunk.fixed64(4 + shift, digest);
            }
            chunk.varint(5 + shift, counting as u64);
            if let Some((_, partial)) = dump {
                chunk.varint(7, u64::from(partial));
            }
            chunk.0
        })
    }
}

/// Sequence hash and chain of each block.
type Places = ByEngineHash<(u64, u32)>;

/// Sorts blocks into chains, which an index loads as a whole: a block continues the chain of its parent unless a sibling
/// does. Parents precede children, and equal states have equal orders.
fn in_chains(mut blocks: Vec<(u64, Block)>) -> (Places, Vec<(u64, Block)>) {
    blocks.sort_unstable_by_key(|(engine_hash, block)| (block.depth, *engine_hash));
    let mut places: Places = blocks.iter().map(|(hash, block)| (*hash, (block.sequence, 0))).collect();
    let mut last: Vec<u64> = Vec::new();
    for (engine_hash, block) in &blocks {
        let above = block.parent.filter(|parent| is_at(&places, *parent, block));
        let chain = above.and_then(|parent| Some((parent, places.get(&parent)?.1)));
        let chain = match chain {
            Some((parent, chain)) if last.get(chain as usize) == Some(&parent) => chain,
            _ => {
                last.push(*engine_hash);
                last.len() as u32 - 1
            }
        };
        if let Some(end) = last.get_mut(chain as usize) {
            *end = *engine_hash;
        }
        if let Some((_, of_block)) = places.get_mut(engine_hash) {
            *of_block = chain;
        }
    }
    blocks.sort_by_cached_key(|(engine_hash, _)| places.get(engine_hash).map(|(_, chain)| *chain));
    (places, blocks)
}

fn is_at(places: &Places, parent: u64, block: &Block) -> bool {
    places.get(&parent).is_some_and(|(sequence, _)| *sequence == block.parent_place)
}

fn encode_record(engine_hash: u64, block: &Block, parent: Option<u64>) -> Vec<u8> {
    let mut record = Writer::default();
    if engine_hash != 0 {
        record.fixed64(1, engine_hash);
    }
    if let Some(parent) = parent {
        record.fixed64(2, parent);
    }
    if block.local != 0 {
        record.fixed64(3, block.local);
    }
    if block.sequence != 0 {
        record.fixed64(4, block.sequence);
    }
    record.varint(5, block.depth.into());
    for (tier, copies) in (1u64..).zip(block.copies) {
        if copies > 0 {
            let mut held = Writer::default();
            held.varint(1, tier);
            held.varint(2, copies.into());
            record.bytes(6, &held.0);
        }
    }
    record.0
}
