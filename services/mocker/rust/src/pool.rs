//! The paged KV cache: content of blocks and order of eviction, as in `kvrouter.mocker.engine.block_pool`.
//!
//! A page stores the content of a block. Blocks that are empty, or in use without content, are only counted.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use xxhash_rust::xxh3::xxh3_64_with_seed;

const NONE: u32 = u32::MAX;

/// Returns the engine hash of a block: XXH3-64 of its tokens (little-endian u32), seeded with the parent's.
pub fn engine_hash(parent: u64, tokens: &[u8]) -> u64 {
    xxh3_64_with_seed(tokens, parent)
}

/// A block whose content is cached.
#[derive(Clone, Copy)]
struct Page {
    parent: u64,
    hash: u64,
    /// The scope's root hash.
    root: u64,
    first: bool,
    uses: u32,
    /// Neighbours in the list of idle blocks, least recently used first.
    before: u32,
    after: u32,
    /// The next younger copy of the same content.
    younger: u32,
}

/// A row of the block table.
pub struct Row<'a> {
    pub hash: u64,
    pub parent: Option<u64>,
    pub root: u64,
    pub tokens: &'a [u8],
    pub copies: usize,
}

pub struct Pool {
    total: usize,
    /// Bytes of a block's tokens.
    width: usize,
    /// Number of blocks without content that are not in use.
    empty: usize,
    pages: Vec<Page>,
    /// Content of each page: tokens, little-endian u32.
    tokens: Vec<u8>,
    unused: Vec<u32>,
    /// The oldest copy of each content, by engine hash.
    cached: HashTable<u32>,
    oldest_idle: u32,
    newest_idle: u32,
    idle: usize,
}

impl Pool {
    pub fn new(total: usize, block_size: usize) -> Self {
        Self {
            total,
            width: 4 * block_size,
            empty: total,
            pages: Vec::new(),
            tokens: Vec::new(),
            unused: Vec::new(),
            cached: HashTable::new(),
            oldest_idle: NONE,
            newest_idle: NONE,
            idle: 0,
        }
    }

    pub fn free(&self) -> usize {
        self.empty + self.idle
    }

    pub fn active(&self) -> usize {
        self.total - self.free()
    }

    pub fn idle(&self) -> usize {
        self.idle
    }

    pub fn uses(&self, page: u32) -> u32 {
        self.pages[page as usize].uses
    }

    fn content(&self, page: u32) -> &[u8] {
        let start = page as usize * self.width;
        &self.tokens[start..start + self.width]
    }

    /// Returns the cached blocks at the start of a sequence, at most `limit`. `chain[i]` is the parent hash of block i.
    pub fn find(&self, chain: &[u64], tokens: &[u8], limit: usize) -> Vec<u32> {
        let blocks = tokens.chunks_exact(self.width).zip(chain.windows(2)).take(limit);
        blocks.map_while(|(content, link)| self.lookup(link[0], link[1], content)).collect()
    }

    fn lookup(&self, parent: u64, hash: u64, content: &[u8]) -> Option<u32> {
        let holds = |page: &u32| self.pages[*page as usize].parent == parent && self.content(*page) == content;
        self.cached.find(hash, holds).copied()
    }

    /// Uses cached blocks once more.
    pub fn hold(&mut self, pages: &[u32]) {
        for &page in pages {
            if self.pages[page as usize].uses == 0 {
                self.unlink(page);
            }
            self.pages[page as usize].uses += 1;
        }
    }

    /// Takes free blocks into use, without content; appends the hashes of evicted copies to `evicted`, in order.
    pub fn take(&mut self, count: usize, evicted: &mut Vec<u64>) {
        let from_empty = count.min(self.empty);
        self.empty -= from_empty;
        for _ in from_empty..count {
            let page = self.oldest_idle;
            self.unlink(page);
            evicted.push(self.pages[page as usize].hash);
            self.drop_copy(page);
            self.unused.push(page);
        }
    }

    fn drop_copy(&mut self, page: u32) {
        let Page { hash, younger, .. } = self.pages[page as usize];
        let (pages, tokens, width) = (&mut self.pages, &self.tokens, self.width);
        let content = |page: u32| &tokens[page as usize * width..(page as usize + 1) * width];
        let parent = pages[page as usize].parent;
        let same = |other: &u32| pages[*other as usize].parent == parent && content(*other) == content(page);
        let Ok(mut entry) = self.cached.find_entry(hash, same) else { return };
        let mut at = *entry.get();
        if at == page {
            if younger == NONE {
                entry.remove();
            } else {
                *entry.get_mut() = younger;
            }
            return;
        }
        while pages[at as usize].younger != page {
            at = pages[at as usize].younger;
        }
        pages[at as usize].younger = younger;
    }

    /// Makes a block in use cached, with its content.
    pub fn store(&mut self, parent: u64, hash: u64, content: &[u8], root: u64, first: bool) -> u32 {
        let page = Page { parent, hash, root, first, uses: 1, before: NONE, after: NONE, younger: NONE };
        let at = match self.unused.pop() {
            Some(at) => {
                self.pages[at as usize] = page;
                let start = at as usize * self.width;
                self.tokens[start..start + self.width].copy_from_slice(content);
                at
            }
            None => {
                self.pages.push(page);
                self.tokens.extend_from_slice(content);
                (self.pages.len() - 1) as u32
            }
        };
        let (pages, tokens, width) = (&mut self.pages, &self.tokens, self.width);
        let same = |other: &u32| {
            let start = *other as usize * width;
            pages[*other as usize].parent == parent && &tokens[start..start + width] == content
        };
        match self.cached.entry(hash, same, |page| pages[*page as usize].hash) {
            Entry::Vacant(vacant) => {
                vacant.insert(at);
            }
            Entry::Occupied(occupied) => {
                let mut copy = *occupied.get();
                while pages[copy as usize].younger != NONE {
                    copy = pages[copy as usize].younger;
                }
                pages[copy as usize].younger = at;
            }
        }
        at
    }

    /// Ends a sequence's use of its blocks: `pages` in the order of the prompt, and `contentless` further ones.
    ///
    /// The last block becomes idle first, so that it is evicted before its ancestors.
    pub fn release(&mut self, pages: &[u32], contentless: usize) {
        self.empty += contentless;
        for &page in pages.iter().rev() {
            self.pages[page as usize].uses -= 1;
            if self.pages[page as usize].uses == 0 {
                self.link_newest(page);
            }
        }
    }

    /// Drops all content. No block may be in use.
    pub fn clear(&mut self) {
        *self = Self::new(self.total, self.width / 4);
    }

    /// Returns the cached blocks, in use or idle: one row for each content.
    pub fn table(&self) -> impl Iterator<Item = Row<'_>> {
        self.cached.iter().map(|&at| {
            let page = &self.pages[at as usize];
            let (mut copies, mut copy) = (1, page.younger);
            while copy != NONE {
                copies += 1;
                copy = self.pages[copy as usize].younger;
            }
            let parent = (!page.first).then_some(page.parent);
            Row { hash: page.hash, parent, root: page.root, tokens: self.content(at), copies }
        })
    }

    fn link_newest(&mut self, page: u32) {
        let before = self.newest_idle;
        self.pages[page as usize].before = before;
        self.pages[page as usize].after = NONE;
        if before == NONE {
            self.oldest_idle = page;
        } else {
            self.pages[before as usize].after = page;
        }
        self.newest_idle = page;
        self.idle += 1;
    }

    fn unlink(&mut self, page: u32) {
        let Page { before, after, .. } = self.pages[page as usize];
        if before == NONE {
            self.oldest_idle = after;
        } else {
            self.pages[before as usize].after = after;
        }
        if after == NONE {
            self.newest_idle = before;
        } else {
            self.pages[after as usize].before = before;
        }
        self.idle -= 1;
    }
}
