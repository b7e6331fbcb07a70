//! Blocks in order of their last use, at most so many.

use crate::hash::ByEngineHash;

/// No entry.
const NONE: u32 = u32::MAX;

struct Entry {
    block: u64,
    at: f64,
    older: u32,
    newer: u32,
}

/// What the use of a block changed: times of last uses, in seconds.
#[derive(Default)]
pub struct Touched {
    /// Of the block, before; None if it was not there.
    pub before: Option<f64>,
    /// Of the block that was dropped for it.
    pub dropped: Option<f64>,
}

/// Blocks with the time of their last use.
pub struct RecentBlocks {
    most: usize,
    ids: ByEngineHash<u32>,
    entries: Vec<Entry>,
    oldest: u32,
    newest: u32,
}

impl RecentBlocks {
    /// Keeps the `most` blocks used last.
    pub fn new(most: usize) -> Self {
        let most = most.min(NONE as usize);
        Self { most, ids: ByEngineHash::default(), entries: Vec::new(), oldest: NONE, newest: NONE }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn most(&self) -> usize {
        self.most
    }

    /// Iterates over the times of last uses, from the least recent one.
    pub fn oldest_first(&self) -> impl Iterator<Item = f64> {
        let first = self.entries.get(self.oldest as usize);
        std::iter::successors(first, |entry| self.entries.get(entry.newer as usize)).map(|entry| entry.at)
    }

    /// Records the use of a block at a time not before the last one.
    pub fn touch(&mut self, block: u64, at: f64) -> Touched {
        if self.most == 0 {
            return Touched::default();
        }
        let mut touched = Touched::default();
        let id = if let Some(&id) = self.ids.get(&block) {
            self.unlink(id);
            touched.before = self.entries.get(id as usize).map(|entry| entry.at);
            id
        } else if self.entries.len() < self.most {
            self.entries.push(Entry { block, at, older: NONE, newer: NONE });
            (self.entries.len() - 1) as u32
        } else {
            let id = self.oldest;
            self.unlink(id);
            if let Some(entry) = self.entries.get(id as usize) {
                touched.dropped = Some(entry.at);
                self.ids.remove(&entry.block);
            }
            id
        };
        if touched.before.is_none() {
            self.ids.insert(block, id);
        }
        let older = self.newest;
        if let Some(entry) = self.entries.get_mut(id as usize) {
            *entry = Entry { block, at, older, newer: NONE };
        }
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = id,
            None => self.oldest = id,
        }
        self.newest = id;
        touched
    }

    /// Keeps the blocks that `keep` accepts, and of those the `most` used last.
    pub fn limit(&mut self, most: usize, keep: impl Fn(u64) -> bool) {
        let mut kept: Vec<(u64, f64)> = Vec::new();
        let mut id = self.oldest;
        while let Some(entry) = self.entries.get(id as usize) {
            if keep(entry.block) {
                kept.push((entry.block, entry.at));
            }
            id = entry.newer;
        }
        if most == self.most && kept.len() == self.entries.len() {
            return;
        }
        *self = Self::new(most);
        for (block, at) in kept.split_off(kept.len().saturating_sub(most)) {
            self.touch(block, at);
        }
    }

    fn unlink(&mut self, id: u32) {
        let Some(&Entry { older, newer, .. }) = self.entries.get(id as usize) else { return };
        match self.entries.get_mut(older as usize) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
    }
}
