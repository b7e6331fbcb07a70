//! The prefix index: a radix tree of blocks, their residency on ranks, and a table from engine hashes to blocks.
//!
//! Places are exact: the place of a block is the path of local hashes from the root, compared hash by hash. A table
//! with 5 bytes per entry finds engine hashes. Each block of a node has one engine hash that all ranks share; a rank
//! that uses another one for it has a hash alias. See `docs/explanation/prefix-index.md`.

pub(crate) mod aliases;
pub mod apply;
pub mod budget;
pub(crate) mod compaction;
pub(crate) mod departure;
pub(crate) mod dump;
pub(crate) mod naming;
pub(crate) mod orphans;
pub(crate) mod query;
pub(crate) mod remove;
pub(crate) mod residency;
pub(crate) mod statistics;
pub(crate) mod store;
pub mod tree;

use std::sync::Arc;

use crate::hash::{Secret, sequence_hash};
use crate::index::budget::MemoryBudget;
use crate::index::tree::blocks::{AliasBlocks, Blocks, Slot};
use crate::index::tree::keys::{branch_hash, private_hash};
use crate::index::tree::nodes::{Bits, HashAlias, Node, ROOT, ResidencyRange, SHARED};
use crate::index::tree::ranks::{BlockPosition, Ranks};
use crate::storage::table::Table;
use crate::storage::tagmap::TagMap;

/// Exclusive upper bound of the ids of nodes and aliases.
pub const MAX_RECORDS: u32 = 1 << 30;

/// Implements `kvrouter.core.interface.PrefixIndex`.
pub struct Index {
    pub(crate) secret: Secret,
    pub(crate) blocks: Blocks,
    pub(crate) alias_blocks: AliasBlocks,
    pub(crate) nodes: Table<Node>,
    pub(crate) aliases: Table<HashAlias>,
    pub(crate) bits: Table<Bits>,
    /// Shared engine hashes, by their own hash. Refers to slots of `blocks`.
    pub(crate) shared: TagMap,
    /// Engine hashes of aliases, by the hash of (rank, engine hash). Refers to slots of `alias_blocks`.
    pub(crate) private: TagMap,
    /// Branches, by (node, depth, first local hash). Refers to nodes.
    pub(crate) branches: TagMap,
    pub(crate) ranks: Ranks,
    /// Number of (rank, engine hash, tier) triples.
    pub(crate) entries: u64,
    /// Number of those in host memory, on disk or in shared storage.
    pub(crate) slow_entries: u64,
    /// Number of those that are checkpoints.
    pub(crate) checkpoint_entries: u64,
    /// Number of changes that may have added or removed entries of any rank.
    pub(crate) changes: u64,
    /// Number of entries of orphan blocks.
    pub(crate) orphan_entries: u64,
    /// Heap memory of nodes, aliases and bitmaps, in bytes.
    pub(crate) heap: usize,
    /// Ids of nodes that may have blocks without residents.
    pub(crate) loose: Vec<u32>,
    /// The last result of `sequence_at`: (node, depth, hash). None if nodes may have changed since.
    pub(crate) reached: Option<(u32, u32, u64)>,
    pub(crate) scratch: crate::index::tree::scratch::Scratch,
    pub(crate) max_blocks: u64,
    budget: Arc<MemoryBudget>,
    /// Memory that the budget counts for this index, in bytes.
    charged: u64,
    pub(crate) check_digests: bool,
    pub(crate) trim_debt: u64,
}

impl Index {
    /// Creates an empty index. A bound of 0 is no bound.
    pub fn new(max_blocks: u64, max_bytes: u64, check_digests: bool) -> Self {
        Self::with_budget(max_blocks, Arc::new(MemoryBudget::new(max_bytes)), check_digests)
    }

    /// Creates an empty index whose memory counts against a budget, which it may share with other indexes.
    pub fn with_budget(max_blocks: u64, budget: Arc<MemoryBudget>, check_digests: bool) -> Self {
        Self {
            secret: Secret::random(),
            blocks: Blocks::new(),
            alias_blocks: AliasBlocks::new(),
            nodes: Table::new(),
            aliases: Table::new(),
            bits: Table::new(),
            shared: TagMap::new(),
            private: TagMap::dense(),
            branches: TagMap::new(),
            ranks: Ranks::default(),
            entries: 0,
            slow_entries: 0,
            checkpoint_entries: 0,
            changes: 0,
            orphan_entries: 0,
            heap: 0,
            loose: Vec::new(),
            reached: None,
            scratch: Default::default(),
            max_blocks,
            budget,
            charged: 0,
            check_digests,
            trim_debt: 0,
        }
    }

    /// Returns the memory of the index, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.ranks.heap() + self.bytes_beside_ranks()
    }

    fn bytes_beside_ranks(&self) -> usize {
        self.blocks.pages().bytes()
            + self.alias_blocks.pages().bytes()
            + self.nodes.bytes()
            + self.aliases.bytes()
            + self.bits.bytes()
            + self.shared.bytes()
            + self.private.bytes()
            + self.branches.bytes()
            + self.heap
            + self.scratch.heap()
    }

    /// Returns the maximum number of table entries that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.shared.most_moved().max(self.private.most_moved()).max(self.branches.most_moved())
    }

    /// Returns whether the index exceeds a bound. Only the rank `changed` may have changed since the last call.
    pub(crate) fn over_bounds(&mut self, changed: u32) -> bool {
        if self.max_blocks > 0 && self.entries > self.max_blocks {
            return true;
        }
        if self.budget.max_bytes() == 0 {
            return false;
        }
        self.ranks.weigh(changed);
        self.charge_budget();
        self.budget.is_exceeded()
    }

    /// Updates the budget by the memory of the index, with the last weights of the ranks.
    pub(crate) fn charge_budget(&mut self) {
        let bytes = (self.ranks.weight() + self.bytes_beside_ranks()) as u64;
        self.budget.charge(self.charged, bytes);
        self.charged = bytes;
    }

    /// Returns the node that branches off `node` at `depth` with this local hash.
    #[inline]
    pub(crate) fn branch(&self, node: u32, depth: u32, local: u64) -> Option<u32> {
        self.branches.find(branch_hash(self.secret, node, depth, local), |id| {
            let branch = self.nodes.at(id);
            branch.parent == node && branch.start == depth && self.blocks.local(branch.slot(depth)) == local
        })
    }

    /// Returns whether a residency range covers the block at a depth.
    #[inline]
    pub(crate) fn has(&self, node: &Node, range: &ResidencyRange, depth: u32) -> bool {
        range.lo <= depth && depth < range.hi && (range.bits == 0 || self.bits.at(range.bits).get(depth - node.start))
    }

    /// Returns whether a block is resident on a rank under an alias, in any tier.
    #[inline]
    pub(crate) fn holds(&self, rank: u32, position: BlockPosition) -> bool {
        let node = self.nodes.at(position.node);
        node.of_rank(rank).iter().any(|range| range.alias == position.alias && self.has(node, range, position.depth))
    }

    /// Returns the place of a shared slot.
    #[inline]
    pub(crate) fn position_of(&self, at: Slot) -> BlockPosition {
        let header = self.blocks.header(at);
        let depth = self.nodes.at(header.owner).start + u32::from(header.number) * 8 + (at & 7);
        BlockPosition { node: header.owner, alias: SHARED, depth }
    }

    /// Returns the position of an engine hash on a rank. `hash` is the hash of the engine hash.
    pub(crate) fn locate(&self, rank: u32, engine: u64, hash: u64) -> Option<BlockPosition> {
        let mut position = None;
        let is_it = |at: Slot| {
            if self.blocks.engine(at) != engine {
                return false;
            }
            let candidate = self.position_of(at);
            let resident = self.holds(rank, candidate);
            if resident {
                position = Some(candidate);
            }
            resident
        };
        if self.shared.find(hash, is_it).is_some() {
            return position;
        }
        if self.ranks.get(rank).is_none_or(|rank| rank.private == 0) {
            return None;
        }
        self.private.find(private_hash(self.secret, rank, engine), |at| {
            let header = self.alias_blocks.header(at);
            let alias = self.aliases.at(header.owner);
            if self.alias_blocks.engine(at) != engine || alias.rank != rank {
                return false;
            }
            let depth = alias.start + u32::from(header.number) * 8 + (at & 7);
            position = Some(BlockPosition { node: alias.node, alias: header.owner, depth });
            true
        });
        position
    }

    /// Returns the engine hash of a block under an alias; None outside of the alias.
    #[inline]
    pub(crate) fn engine_at(&self, position: BlockPosition) -> Option<u64> {
        if position.alias == SHARED {
            let node = self.nodes.at(position.node);
            (node.start <= position.depth && position.depth < node.end())
                .then(|| self.blocks.engine(node.slot(position.depth)))
        } else {
            let alias = self.aliases.at(position.alias);
            (alias.start <= position.depth && position.depth < alias.end())
                .then(|| self.alias_blocks.engine(alias.slot(position.depth)))
        }
    }

    /// Returns the sequence hash of the block before the first one of a node.
    pub(crate) fn prefix(&self, id: u32) -> u64 {
        // Goes up to an ancestor whose prefix is known or that starts a sequence, then down again.
        let mut path = Vec::new();
        let mut at = id;
        let mut hash = 0;
        while at != ROOT {
            let node = self.nodes.at(at);
            if node.start == 0 {
                break;
            }
            if let Some(known) = node.prefix() {
                hash = known;
                break;
            }
            path.push(at);
            at = node.parent;
        }
        // `at` is the lowest node whose prefix is known: `hash`, or none at depth 0.
        for below in path.into_iter().rev() {
            let node = self.nodes.at(at);
            let until = self.nodes.at(below).start;
            for depth in node.start..until {
                hash = sequence_hash(depth, hash, self.blocks.local(node.slot(depth)));
            }
            self.nodes.at(below).set_prefix(hash);
            at = below;
        }
        hash
    }

    /// Returns the sequence hash of a block. It continues from the previous call, because callers walk chains block by
    /// block.
    pub(crate) fn sequence_at(&mut self, node_id: u32, depth: u32) -> u64 {
        let node = self.nodes.at(node_id);
        let (from, mut hash) = match self.reached {
            Some((same, last, hash)) if same == node_id && last < depth => (last + 1, hash),
            _ => (node.start, self.prefix(node_id)),
        };
        for at in from..=depth {
            hash = sequence_hash(at, hash, self.blocks.local(node.slot(at)));
        }
        self.reached = Some((node_id, depth, hash));
        hash
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        self.budget.charge(self.charged, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_share_a_budget_and_return_their_part() {
        let budget = Arc::new(MemoryBudget::new(1 << 30));
        let [mut one, mut other] = [(); 2].map(|()| Index::with_budget(0, Arc::clone(&budget), false));
        one.reset_rank((1, 0), 1, 0, false);
        other.reset_rank((2, 0), 1, 0, false);
        assert_eq!(budget.used_bytes(), (one.memory_bytes() + other.memory_bytes()) as u64);
        other.remove_rank((2, 0));
        assert_eq!(budget.used_bytes(), (one.memory_bytes() + other.memory_bytes()) as u64);
        drop((one, other));
        assert_eq!(budget.used_bytes(), 0);
    }
}
