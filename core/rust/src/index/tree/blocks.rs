//! Storage of blocks: chunks of eight, in pages of the arena.
//!
//! A chunk of a node has eight local hashes and eight shared engine hashes, a cache line each. A chunk of an alias has
//! eight engine hashes. Each chunk has an 8-byte header, so that a reference is enough to find the position of a block.

use crate::storage::memory::prefetch;
use crate::storage::pages::{Page, Pages};

/// Number of blocks in a chunk.
pub const LANES: u32 = 8;

/// Refers to a block in a chunk: the chunk's id, then the lane.
pub type Slot = u32;

/// Returns the slot of a lane of a chunk.
#[inline]
pub const fn slot(chunk: u32, lane: u32) -> Slot {
    chunk << 3 | (lane & 7)
}

/// The owner of a chunk, and the state of its lanes.
#[derive(Clone, Copy)]
pub struct Header {
    /// The node (of a block chunk) or the alias (of an alias chunk).
    pub owner: u32,
    /// The chunk's number in its owner.
    pub number: u16,
    /// Lanes whose engine hash is in the table of engine hashes.
    pub listed: u8,
    /// Lanes whose engine hash may also be listed for another block.
    pub doubled: u8,
}

/// Eight blocks of a node.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Chunk {
    pub locals: [u64; 8],
    pub engines: [u64; 8],
}

/// A page of block chunks.
#[repr(C, align(4096))]
pub struct BlockPage {
    live: u64,
    spare: u64,
    headers: [Header; 30],
    chunks: [Chunk; 30],
}

// SAFETY: 16 + 30 * 8 + 30 * 128 = 4096 bytes (asserted below) of plain integers.
unsafe impl Page for BlockPage {
    const UNITS: u32 = 30;
    const SHIFT: u32 = 5;
    fn live(&self) -> u64 {
        self.live
    }
    fn set_live(&mut self, live: u64) {
        self.live = live;
    }
}

/// A page of alias chunks.
#[repr(C, align(4096))]
pub struct AliasPage {
    live: u64,
    spare: [u64; 7],
    headers: [Header; 56],
    chunks: [[u64; 8]; 56],
}

// SAFETY: 64 + 56 * 8 + 56 * 64 = 4096 bytes (asserted below) of plain integers.
unsafe impl Page for AliasPage {
    const UNITS: u32 = 56;
    const SHIFT: u32 = 6;
    fn live(&self) -> u64 {
        self.live
    }
    fn set_live(&mut self, live: u64) {
        self.live = live;
    }
}

const _: () = assert!(size_of::<BlockPage>() == 4096 && size_of::<AliasPage>() == 4096);

const NO_HEADER: Header = Header { owner: 0, number: 0, listed: 0, doubled: 0 };
static NO_CHUNK: Chunk = Chunk { locals: [0; 8], engines: [0; 8] };

#[inline]
fn lane(words: &[u64; 8], slot: Slot) -> u64 {
    words.get((slot & 7) as usize).copied().unwrap_or_default()
}

/// Returns the bit of a slot's lane.
#[inline]
pub const fn bit(slot: Slot) -> u8 {
    1 << (slot & 7)
}

/// Chunks of nodes.
pub struct Blocks(Pages<BlockPage>);

impl Blocks {
    pub fn new() -> Self {
        let null = BlockPage { live: 0, spare: 0, headers: [NO_HEADER; 30], chunks: [NO_CHUNK; 30] };
        Self(Pages::new(Box::new(null)))
    }

    pub fn pages(&self) -> &Pages<BlockPage> {
        &self.0
    }

    pub fn pages_mut(&mut self) -> &mut Pages<BlockPage> {
        &mut self.0
    }

    /// Allocates a chunk for a node.
    pub fn allocate(&mut self, owner: u32, number: u16) -> Option<u32> {
        let id = self.0.allocate()?;
        if let Some(header) = self.header_mut(slot(id, 0)) {
            *header = Header { owner, number, listed: 0, doubled: 0 };
        }
        Some(id)
    }

    #[inline]
    pub fn chunk(&self, id: u32) -> &Chunk {
        self.0.page(id).chunks.get(Pages::<BlockPage>::unit(id)).unwrap_or(&NO_CHUNK)
    }

    #[inline]
    pub fn chunk_mut(&mut self, id: u32) -> Option<&mut Chunk> {
        self.0.page_mut(id).chunks.get_mut(Pages::<BlockPage>::unit(id))
    }

    /// Returns a chunk and its header.
    #[inline]
    pub fn both_mut(&mut self, id: u32) -> Option<(&mut Header, &mut Chunk)> {
        let unit = Pages::<BlockPage>::unit(id);
        let page = self.0.page_mut(id);
        page.headers.get_mut(unit).zip(page.chunks.get_mut(unit))
    }

    #[inline]
    pub fn header(&self, at: Slot) -> Header {
        self.0.page(at >> 3).headers.get(Pages::<BlockPage>::unit(at >> 3)).copied().unwrap_or(NO_HEADER)
    }

    #[inline]
    pub fn header_mut(&mut self, at: Slot) -> Option<&mut Header> {
        self.0.page_mut(at >> 3).headers.get_mut(Pages::<BlockPage>::unit(at >> 3))
    }

    /// Prefetches the local hashes of a chunk.
    #[inline]
    pub fn prefetch_locals(&self, id: u32) {
        prefetch(&self.chunk(id).locals);
    }

    /// Prefetches the engine hashes of a chunk.
    #[inline]
    pub fn prefetch_engines(&self, id: u32) {
        prefetch(&self.chunk(id).engines);
    }

    #[inline]
    pub fn local(&self, at: Slot) -> u64 {
        lane(&self.chunk(at >> 3).locals, at)
    }

    #[inline]
    pub fn engine(&self, at: Slot) -> u64 {
        lane(&self.chunk(at >> 3).engines, at)
    }

    #[inline]
    pub fn set_engine(&mut self, at: Slot, engine: u64) {
        if let Some(to) = self.chunk_mut(at >> 3).and_then(|chunk| chunk.engines.get_mut((at & 7) as usize)) {
            *to = engine;
        }
    }
}

/// Chunks of aliases.
pub struct AliasBlocks(Pages<AliasPage>);

impl AliasBlocks {
    pub fn new() -> Self {
        let null = AliasPage { live: 0, spare: [0; 7], headers: [NO_HEADER; 56], chunks: [[0; 8]; 56] };
        Self(Pages::new(Box::new(null)))
    }

    pub fn pages(&self) -> &Pages<AliasPage> {
        &self.0
    }

    pub fn pages_mut(&mut self) -> &mut Pages<AliasPage> {
        &mut self.0
    }

    /// Allocates a chunk for an alias.
    pub fn allocate(&mut self, owner: u32, number: u16) -> Option<u32> {
        let id = self.0.allocate()?;
        if let Some(header) = self.header_mut(slot(id, 0)) {
            *header = Header { owner, number, listed: 0, doubled: 0 };
        }
        Some(id)
    }

    #[inline]
    pub fn header(&self, at: Slot) -> Header {
        self.0.page(at >> 3).headers.get(Pages::<AliasPage>::unit(at >> 3)).copied().unwrap_or(NO_HEADER)
    }

    #[inline]
    pub fn header_mut(&mut self, at: Slot) -> Option<&mut Header> {
        self.0.page_mut(at >> 3).headers.get_mut(Pages::<AliasPage>::unit(at >> 3))
    }

    /// Prefetches the engine hashes of a chunk.
    #[inline]
    pub fn prefetch(&self, id: u32) {
        if let Some(words) = self.0.page(id).chunks.get(Pages::<AliasPage>::unit(id)) {
            prefetch(words);
        }
    }

    #[inline]
    pub fn engine(&self, at: Slot) -> u64 {
        self.0.page(at >> 3).chunks.get(Pages::<AliasPage>::unit(at >> 3)).map_or(0, |words| lane(words, at))
    }

    #[inline]
    pub fn set_engine(&mut self, at: Slot, engine: u64) {
        let unit = Pages::<AliasPage>::unit(at >> 3);
        let words = self.0.page_mut(at >> 3).chunks.get_mut(unit);
        if let Some(to) = words.and_then(|words| words.get_mut((at & 7) as usize)) {
            *to = engine;
        }
    }
}
