//! Encodes batches from encoded events.

use super::blocks::NumberedEvent;
use crate::wire::Writer;

/// Maximum size of the events in one batch, bytes; the rest up to the contract's 512 KiB is for the other fields.
pub const MAX_BATCH_BYTES: usize = 480 << 10;

/// Fields that all batches of a rank have.
#[derive(Clone, Debug)]
pub struct BatchHead {
    pub worker_id: u64,
    pub dp_rank: u32,
    pub incarnation: u64,
    pub block_size: u32,
    /// The CopyCounting of the rank.
    pub counting: i32,
}

/// Returns an encoded KvEventBatch. The cursor and the digest are those after the last event.
pub fn encode_batch(
    head: &BatchHead,
    events: &[NumberedEvent],
    next_event_id: u64,
    digest: u64,
    published_unix_ns: u64,
) -> Vec<u8> {
    let mut batch = Writer::default();
    batch.varint(1, head.worker_id);
    batch.varint(2, head.dp_rank.into());
    if head.incarnation != 0 {
        batch.fixed64(3, head.incarnation);
    }
    batch.varint(5, head.block_size.into());
    batch.varint(6, next_event_id);
    batch.fixed64(7, digest);
    if published_unix_ns != 0 {
        batch.fixed64(8, published_unix_ns);
    }
    batch.varint(9, head.counting as u64);
    for event in events {
        batch.bytes(4, &event.encoded);
    }
    batch.0
}
