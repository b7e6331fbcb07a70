//! Labels: names that one rank alone has for blocks of a run.

use crate::index::tree::blocks::{LANES, bit};
use crate::index::tree::keys::{PrivateKeys, private_hash};
use crate::index::tree::nodes::{Label, MAX_BLOCKS, SHARED};
use crate::index::tree::ranks::BlockPosition;
use crate::index::{Index, MAX_RECORDS};

impl Index {
    /// A label of a rank that can take an engine hash for the block at a depth.
    pub(crate) fn label_for(&mut self, rank: u32, run_id: u32, depth: u32) -> Option<u32> {
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
    pub(crate) fn put_private(&mut self, label_id: u32, depth: u32, engine: u64) -> bool {
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
        let keys = PrivateKeys { secret: self.secret, blocks: &self.label_blocks, labels: &self.labels };
        if !self.private.insert(hash, slot, keys) {
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

    /// Takes the engine hashes of a label that its rank holds in no tier any more out of the table, and the label's end
    /// with them.
    pub(crate) fn unlist_private(&mut self, rank: u32, run_id: u32, label_id: u32, from: u32, to: u32) {
        for depth in from..to {
            if self.holds(rank, BlockPosition { run: run_id, label: label_id, depth }) {
                continue;
            }
            let at = self.labels.at(label_id).slot(depth);
            let listed = self.label_blocks.header(at).listed & bit(at) != 0;
            if !listed {
                continue;
            }
            let hash = private_hash(self.secret, rank, self.label_blocks.engine(at));
            let keys = PrivateKeys { secret: self.secret, blocks: &self.label_blocks, labels: &self.labels };
            self.private.remove(hash, at, keys);
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
}
