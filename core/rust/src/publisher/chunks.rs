//! Encodes a rank's state in chunks, as consumers fetch it.

use std::collections::HashMap;

use super::blocks::Block;
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

    /// Returns the encoded GetRankStateResponses, by depth and engine hash, so parents before children; at least one.
    ///
    /// A parent is included only if it is still resident at the position that it had when its child was stored.
    pub fn into_chunks(mut self, chunk_blocks: usize) -> impl Iterator<Item = Vec<u8>> {
        let places: HashMap<u64, u64> = self.blocks.iter().map(|(hash, block)| (*hash, block.sequence)).collect();
        self.blocks.sort_unstable_by_key(|(engine_hash, block)| (block.depth, *engine_hash));
        let chunk_blocks = chunk_blocks.max(1);
        let count = self.blocks.len().div_ceil(chunk_blocks).max(1);
        (0..count).map(move |number| {
            let mut cursor = Writer::default();
            if self.incarnation != 0 {
                cursor.fixed64(1, self.incarnation);
            }
            cursor.varint(2, self.next_event_id);
            let mut chunk = Writer::default();
            chunk.bytes(1, &cursor.0);
            for (engine_hash, block) in self.blocks.iter().skip(number * chunk_blocks).take(chunk_blocks) {
                let parent = block.parent.filter(|parent| places.get(parent) == Some(&block.parent_place));
                chunk.bytes(2, &encode_record(*engine_hash, block, parent));
            }
            chunk.varint(3, u64::from(number + 1 == count));
            if self.digest != 0 {
                chunk.fixed64(4, self.digest);
            }
            chunk.varint(5, self.counting as u64);
            chunk.0
        })
    }
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
