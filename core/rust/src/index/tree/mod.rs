//! The records of the index's tree: nodes, blocks, ranks, and keys of tables.

pub(crate) mod blocks;
pub(crate) mod keys;
pub(crate) mod nodes;
pub mod ranks;
pub(crate) mod scratch;
