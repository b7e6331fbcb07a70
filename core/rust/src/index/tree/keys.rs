//! The keys of the index's tables, and how they are hashed.

use crate::hash::Secret;
use crate::index::tree::blocks::{Blocks, LabelBlocks, Slot};
use crate::index::tree::nodes::{Label, Run};
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

/// Engine hashes of labels with their ranks, by slots of `blocks`.
pub struct PrivateKeys<'a> {
    pub secret: Secret,
    pub blocks: &'a LabelBlocks,
    pub labels: &'a Table<Label>,
}

impl Keys for PrivateKeys<'_> {
    #[inline]
    fn hash(&self, at: Slot) -> u64 {
        private_hash(self.secret, self.labels.at(self.blocks.header(at).owner).rank, self.blocks.engine(at))
    }

    #[inline]
    fn prefetch(&self, at: Slot) {
        self.blocks.prefetch(at >> 3);
    }
}

/// Branches: where runs hang and what they begin with, by their ids.
pub struct BranchKeys<'a> {
    pub secret: Secret,
    pub runs: &'a Table<Run>,
    pub blocks: &'a Blocks,
}

impl Keys for BranchKeys<'_> {
    fn hash(&self, id: u32) -> u64 {
        let run = self.runs.at(id);
        branch_hash(self.secret, run.parent, run.start, self.blocks.local(run.slot(run.start)))
    }
}

#[inline]
pub fn branch_hash(secret: Secret, run: u32, depth: u32, local: u64) -> u64 {
    secret.mix_pair(u64::from(run) << 32 | u64::from(depth), local)
}

#[inline]
pub fn private_hash(secret: Secret, rank: u32, engine: u64) -> u64 {
    secret.mix_pair(u64::from(rank), engine)
}
