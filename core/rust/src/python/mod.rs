//! The Python module `kvrouter.core._native`: conversions at the edge, and nothing else.

mod buffers;
mod exclusive;
mod hashing;
mod predicted;
mod prefix_index;
mod sequences;
mod shared;

pub use hashing::{local_hashes, sequence_hashes};
pub use predicted::PredictedIndex;
pub use prefix_index::{ApplySummary, PrefixIndex};
pub use sequences::ActiveSequences;
