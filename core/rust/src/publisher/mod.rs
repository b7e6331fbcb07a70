//! The publisher of a rank without its network: resident blocks, digest, numbered events, batches and state chunks.
//!
//! A block is identified by its engine hash and positioned by its sequence hash, which chains the local hashes from the
//! start of the sequence. An index that applied every event has the same blocks and the same digest.

mod batch;
mod blocks;
mod chunks;
mod event_log;
mod state;
mod table;

pub use batch::{BatchHead, MAX_BATCH_BYTES, encode_batch};
pub use blocks::{Block, Error, NumberedEvent, Scope, TIERS, part_hashes, tier_index};
pub use chunks::{CHUNK_BLOCKS, StateSnapshot};
pub use event_log::EventLog;
pub use state::{MAX_EVENT_BLOCKS, RankState};
