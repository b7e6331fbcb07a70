//! The publisher of a rank without its network: resident blocks, digest, numbered events, batches and state chunks.
//!
//! A block is identified by its engine hash and positioned by its sequence hash, which chains the local hashes from the
//! start of the sequence. An index that applied every event has the same blocks and the same digest.

mod batch;
mod blocks;
mod chunks;
mod event_log;
mod recorder;
mod state;
mod table;

pub use batch::BatchHead;
pub use blocks::{Error, NumberedEvent, Scope};
pub use chunks::{CHUNK_BLOCKS, StateSnapshot};
pub use recorder::{BlockNote, EventRecorder, TakenBatch};
