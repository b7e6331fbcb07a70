//! The keys of the index's tables and their hashes.

use crate::hash::Secret;
use crate::index::tree::blocks::{AliasBlocks, Blocks, Slot};
use crate::index::tree::nodes::{HashAlias, Node};
use crate::storage::table::Table;
use crate::storage::tagmap::Keys;

/// Shared engine hashes, by slots of `blocks`.
pub struct SharedKeys<'a> {
    pub secret: Secret,
    pub blocks: &'a Blocks,
}

impl Keys for SharedKeys<'_> {
    #[inline]
    fn hash(&self, at: Slot) -> u64 {
        self.secret.mix(self.blocks.engine(at))
    }

    #[inline]
    fn prefetch(&self, at: Slot) {
        self.blocks.prefetch_engines(at >> 3);
    }
}

/// Engine hashes of aliases with their ranks, by slots of `blocks`.
pub struct PrivateKeys<'a> {
    pub secret: Secret,
    pub blocks: &'a AliasBlocks,
    pub aliases: &'a Table<HashAlias>,
}

impl Keys for PrivateKeys<'_> {
    #[inline]
    fn hash(&self, at: Slot) -> u64 {
        private_hash(self.secret, self.aliases.at(self.blocks.header(at).owner).rank, self.blocks.engine(at))
    }

    #[inline]
    fn prefetch(&self, at: Slot) {
        self.blocks.prefetch(at >> 3);
    }
}

/// Branches by node id: the parent, the depth and the first local hash.
pub struct BranchKeys<'a> {
    pub secret: Secret,
    pub nodes: &'a Table<Node>,
    pub blocks: &'a Blocks,
}

impl Keys for BranchKeys<'_> {
    fn hash(&self, id: u32) -> u64 {
        let node = self.nodes.at(id);
        branch_hash(self.secret, node.parent, node.start, self.blocks.local(node.slot(node.start)))
    }
}

#[inline]
pub fn branch_hash(secret: Secret, node: u32, depth: u32, local: u64) -> u64 {
    secret.mix_pair(u64::from(node) << 32 | u64::from(depth), local)
}

#[inline]
pub fn private_hash(secret: Secret, rank: u32, engine: u64) -> u64 {
    secret.mix_pair(u64::from(rank), engine)
}
