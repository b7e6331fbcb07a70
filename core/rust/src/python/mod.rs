//! The Python module `kvrouter.core._native`: conversions at the edge, and nothing else.

mod buffers;
mod hashing;

pub use hashing::{local_hashes, sequence_hashes};
