//! Blocks of a rank whose ancestors nobody has told: a dump may hold them, since engines evict parents before children.
//!
//! Such a block's place is known by its sequence hash alone, so it cannot be in the tree. It stays here until it is
//! removed, or stored again below a known parent.

use std::collections::HashMap;

/// A block that floats.
#[derive(Clone, Copy, Debug)]
pub struct FloatingBlock {
    pub sequence: u64,
    /// Sequence hash of the block before it, where that is known.
    pub parent: Option<u64>,
    pub local: u64,
    pub depth: u32,
    /// Copies in each tier.
    pub copies: [u32; 4],
}

/// The floating blocks of one rank.
#[derive(Default)]
pub struct Floating {
    blocks: HashMap<u64, FloatingBlock>,
    /// Engine hashes by sequence hash.
    places: HashMap<u64, Vec<u64>>,
}

impl Floating {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    pub fn get(&self, engine: u64) -> Option<&FloatingBlock> {
        self.blocks.get(&engine)
    }

    /// Copies of an engine hash, to be changed; never to none in all tiers.
    pub fn get_mut(&mut self, engine: u64) -> Option<&mut FloatingBlock> {
        self.blocks.get_mut(&engine)
    }

    /// Adds a block; one with this engine hash must not be there.
    pub fn add(&mut self, engine: u64, block: FloatingBlock) {
        self.places.entry(block.sequence).or_default().push(engine);
        self.blocks.insert(engine, block);
    }

    /// Takes a block out.
    pub fn take(&mut self, engine: u64) -> Option<FloatingBlock> {
        let block = self.blocks.remove(&engine)?;
        if let Some(engines) = self.places.get_mut(&block.sequence) {
            engines.retain(|at| *at != engine);
            if engines.is_empty() {
                self.places.remove(&block.sequence);
            }
        }
        Some(block)
    }

    /// Whether a place is held in a tier up to `tier` (from 0).
    pub fn holds(&self, sequence: u64, tier: u32) -> bool {
        self.places.get(&sequence).into_iter().flatten().any(|engine| {
            self.get(*engine).is_some_and(|block| block.copies.iter().take(tier as usize + 1).any(|copies| *copies > 0))
        })
    }

    /// All blocks, by engine hash.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &FloatingBlock)> {
        self.blocks.iter().map(|(engine, block)| (*engine, block))
    }

    /// Drops a tier, or all. Returns the entries dropped, and those of them in other tiers than the first.
    pub fn drop_tier(&mut self, tier: Option<u32>) -> (u64, u64) {
        let (mut dropped, mut slow) = (0, 0);
        let mut gone = Vec::new();
        for (engine, block) in &mut self.blocks {
            for (at, copies) in (0u32..).zip(&mut block.copies) {
                if *copies > 0 && tier.is_none_or(|tier| tier == at) {
                    *copies = 0;
                    dropped += 1;
                    slow += u64::from(at > 0);
                }
            }
            if block.copies == [0; 4] {
                gone.push(*engine);
            }
        }
        for engine in gone {
            self.take(engine);
        }
        (dropped, slow)
    }

    pub fn heap(&self) -> usize {
        self.blocks.capacity() * (size_of::<FloatingBlock>() + 9) + self.places.capacity() * 41 + self.places.len() * 32
    }
}
