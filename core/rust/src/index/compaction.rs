//! Frees blocks that are not resident on any rank, and returns their memory.

use crate::index::Index;
use crate::index::tree::blocks::{LANES, Slot, bit, slot};
use crate::index::tree::keys::{BranchKeys, SharedKeys, branch_hash};
use crate::index::tree::nodes::ROOT;
use crate::storage::memory::trim_heap;

/// Minimum number of freed blocks for a trim of the heap, which walks the whole heap.
const TRIM_AFTER: u64 = 1 << 17;
/// Number of engine hashes that are collected before they are removed, so that their cache lines are fetched together.
const UNLISTED_AT_ONCE: usize = 1 << 10;

impl Index {
    /// Frees blocks without residents in the nodes that were changed.
    pub(crate) fn compact(&mut self) {
        self.reached = None;
        while let Some(node) = self.loose.pop() {
            self.compact_node(node);
        }
        self.shared.shrink_to_fit(&SharedKeys { secret: self.secret, blocks: &self.blocks });
    }

    fn compact_node(&mut self, id: u32) {
        let mut id = id;
        while id != ROOT {
            let node = self.nodes.at(id);
            if node.len == 0 {
                return;
            }
            if node.residency_ranges.is_empty() && node.children == 0 {
                let parent = node.parent;
                self.free_node(id);
                if parent != ROOT {
                    let above = self.nodes.at_mut(parent);
                    above.children = above.children.saturating_sub(1);
                    if above.children == 0 {
                        above.deepest_branch = above.start;
                        above.dropped = u32::MAX;
                    }
                }
                id = parent;
                continue;
            }
            // With many residency ranges, amortizes the scan of all of them over as many removals.
            if (node.dropped as usize).saturating_mul(4) >= node.residency_ranges.len() {
                let deepest = node.residency_ranges.iter().map(|range| range.hi).max().unwrap_or(node.start);
                let end = if node.children > 0 { deepest.max(node.deepest_branch) } else { deepest };
                if end < node.end() && end > node.start {
                    self.cut(id, end);
                }
                self.nodes.at_mut(id).dropped = 0;
            }
            return;
        }
    }

    /// Removes the engine hashes from a depth on from the table. Chunks that are entirely behind the depth stay marked
    /// as listed, because they are freed next.
    fn unlist_from(&mut self, id: u32, depth: u32) {
        let mut unlisting = std::mem::take(&mut self.scratch.references);
        let first = depth - self.nodes.at(id).start;
        for number in first / LANES.. {
            let Some(&chunk) = self.nodes.at(id).chunks.get(number as usize) else { break };
            let Some((header, content)) = self.blocks.both_mut(chunk) else { break };
            let mut kept = 0;
            if number == first / LANES {
                kept = bit(first) - 1;
                header.doubled &= kept;
            }
            for (lane, engine) in (0u32..).zip(&content.engines) {
                if header.listed & !kept & bit(lane) != 0 {
                    unlisting.push((self.secret.mix(*engine), slot(chunk, lane)));
                }
            }
            if number == first / LANES {
                header.listed &= kept;
            }
            if unlisting.len() >= UNLISTED_AT_ONCE {
                self.unlist_all(&mut unlisting);
            }
        }
        self.unlist_all(&mut unlisting);
        self.scratch.references = unlisting;
    }

    fn unlist_all(&mut self, unlisting: &mut Vec<(u64, Slot)>) {
        self.shared.remove_all(unlisting);
        unlisting.clear();
    }

    /// Ends a node at a depth.
    fn cut(&mut self, id: u32, end: u32) {
        self.unlist_from(id, end);
        let node = self.nodes.at_mut(id);
        let before = node.heap();
        node.len = end - node.start;
        let chunks = node.len.div_ceil(8) as usize;
        for chunk in node.chunks.drain(chunks.min(node.chunks.len())..) {
            self.blocks.pages_mut().free(chunk);
        }
        if node.chunks.capacity() > 2 * node.chunks.len() + 8 {
            node.chunks.shrink_to(node.chunks.len() + 4);
        }
        self.heap = self.heap + node.heap() - before;
    }

    /// Removes a node without residency ranges and without branches.
    fn free_node(&mut self, id: u32) {
        let node = self.nodes.at(id);
        let (start, parent) = (node.start, node.parent);
        let hash = branch_hash(self.secret, parent, start, self.blocks.local(node.slot(start)));
        self.unlist_from(id, start);
        let (secret, nodes, blocks) = (self.secret, &self.nodes, &self.blocks);
        self.branches.remove(hash, id, BranchKeys { secret, nodes, blocks });
        let node = self.nodes.take(id);
        self.heap -= node.heap();
        self.trim_debt += u64::from(node.len);
        for chunk in node.chunks {
            self.blocks.pages_mut().free(chunk);
        }
    }

    /// Returns free memory to the system, and updates the budget. `departed`: whether many blocks may have been freed.
    pub(crate) fn give_back(&mut self, departed: bool) {
        self.blocks.pages_mut().give_back();
        self.alias_blocks.pages_mut().give_back();
        if self.nodes.len() == 0 {
            self.nodes.shrink();
            self.aliases.shrink();
            self.bits.shrink();
            self.shared.shrink();
            self.private.shrink();
            self.branches.shrink();
            self.loose = Vec::new();
        }
        if departed && self.trim_debt > TRIM_AFTER {
            self.trim_debt = 0;
            trim_heap();
        }
        self.charge_budget();
    }

    /// Removes a shared engine hash from the table.
    pub(crate) fn unlist(&mut self, at: Slot) {
        if self.blocks.header(at).listed & bit(at) == 0 {
            return;
        }
        let hash = self.secret.mix(self.blocks.engine(at));
        let (secret, blocks) = (self.secret, &self.blocks);
        self.shared.remove(hash, at, SharedKeys { secret, blocks });
        if let Some(header) = self.blocks.header_mut(at) {
            header.listed &= !bit(at);
            header.doubled &= !bit(at);
        }
    }
}
