//! Records the blocks of one rank and keeps each change until it is sent.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvrouter_core::hash;
use kvrouter_core::publisher::{BatchHead, Error as Refusal, EventRecorder, Scope, StateSnapshot, TakenBatch};
use tokio::sync::{Notify, watch};

use crate::config::unix_ns;
use crate::error::{Error, Status};

/// Blocks that an engine reports as stored, each the parent of the next.
pub struct StoredBlocks<'a> {
    pub token_ids: &'a [u32],
    pub engine_hashes: &'a [u64],
    pub parent: Option<u64>,
    pub tier: i32,
    /// None for the parent's scope.
    pub scope: Option<Scope>,
    /// (index of the block in this report, hash of the content)
    pub multimodal: Vec<(u32, u64)>,
    /// Whether the report repeats resident blocks instead of storing new copies.
    pub repeats: bool,
    /// Tokens per engine hash; 0 for the component's block size.
    pub block_size: u32,
}

/// Numbers of one rank since it was opened.
#[derive(Clone, Debug, Default)]
pub struct RankStats {
    pub next_event_id: u64,
    pub digest: u64,
    pub blocks: u64,
    pub partial: bool,
    pub unknown_removals: u64,
    pub unplaced_blocks: u64,
    pub batches_sent: u64,
    pub heartbeats_sent: u64,
    pub bytes_sent: u64,
    pub retries: u64,
    pub events_dropped: u64,
    pub unsent_events: u64,
}

/// Counts of what was sent.
#[derive(Default)]
pub struct Sent {
    pub batches: AtomicU64,
    pub heartbeats: AtomicU64,
    pub bytes: AtomicU64,
    pub retries: AtomicU64,
    pub refused: AtomicU64,
}

struct Recorded {
    recorder: EventRecorder,
    partial: bool,
}

/// The blocks and events of one rank. Reports may come from any thread and never wait for NATS.
pub struct Rank {
    pub head: BatchHead,
    pub sent: Sent,
    /// Wakes the sender.
    pub recorded: Notify,
    /// Id of the first event that is not settled: neither accepted, nor refused, nor dropped.
    settled: watch::Sender<u64>,
    inner: Mutex<Recorded>,
}

impl Rank {
    pub fn new(head: BatchHead, buffer_events: usize, buffer_bytes: usize) -> Self {
        let recorder = EventRecorder::new(head.clone(), buffer_events, buffer_bytes);
        Self {
            head,
            sent: Sent::default(),
            recorded: Notify::new(),
            settled: watch::Sender::new(0),
            inner: Mutex::new(Recorded { recorder, partial: false }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Recorded> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a report, and wakes the sender if it has events. Returns what `report` returns.
    fn record<T>(&self, report: impl FnOnce(&mut Recorded) -> Result<T, Refusal>) -> Result<T, Error> {
        let mut recorded = self.lock();
        let before = recorded.recorder.state().next_event_id;
        let result = report(&mut recorded)?;
        if recorded.recorder.state().next_event_id != before {
            self.recorded.notify_one();
        }
        Ok(result)
    }

    /// Reports stored blocks.
    pub fn stored(&self, blocks: &StoredBlocks<'_>) -> Result<(), Error> {
        let own = self.head.block_size;
        let engine_size = if blocks.block_size == 0 { own } else { blocks.block_size };
        if !engine_size.is_multiple_of(own) {
            let message = format!("block_size is {engine_size}: expected a multiple of {own}");
            return Err(Error::new(Status::InvalidEvent, message));
        }
        let (expected, received) = (blocks.engine_hashes.len() * engine_size as usize, blocks.token_ids.len());
        if expected != received {
            return Err(Error::new(
                Status::InvalidEvent,
                format!(
                    "expected the tokens of {} full blocks of {engine_size} tokens, received {received} tokens",
                    blocks.engine_hashes.len()
                ),
            ));
        }
        let scope = match (&blocks.scope, blocks.parent) {
            (Some(scope), _) => Some(Arc::new(scope.clone())),
            // An unknown parent is refused below.
            (None, Some(parent)) => self.lock().recorder.state().get(parent).and_then(|block| block.scope()),
            (None, None) => None,
        };
        let scope = scope.filter(|scope| **scope != Scope::default());
        let seed = scope
            .as_ref()
            .map_or(hash::SEED, |scope| hash::scope_seed(&scope.lora_name, &scope.cache_salt, &scope.tenant));
        let tokens: Vec<u8> = blocks.token_ids.iter().flat_map(|token| token.to_le_bytes()).collect();
        let mut locals = Vec::new();
        hash::local_hashes(&tokens, own as usize, seed, &blocks.multimodal, &mut locals);
        let parts = engine_size / own;
        let (hashes, parent, tier) = (blocks.engine_hashes, blocks.parent, blocks.tier);
        self.record(|recorded| recorded.recorder.stored(hashes, &locals, parent, tier, scope, !blocks.repeats, parts))
    }

    /// Reports that resident blocks are now in another tier too. Returns the number of these hashes that were
    /// recorded.
    pub fn stored_in_tier(&self, engine_hashes: &[u64], tier: i32) -> Result<u64, Error> {
        let unplaced = self.record(|recorded| {
            let before = recorded.recorder.state().unplaced_blocks;
            recorded.recorder.stored_in_tier(engine_hashes, tier)?;
            Ok(recorded.recorder.state().unplaced_blocks - before)
        })?;
        Ok((engine_hashes.len() as u64).saturating_sub(unplaced))
    }

    /// Reports that blocks, or one physical copy of each, left a tier.
    pub fn removed(&self, engine_hashes: &[u64], tier: i32) -> Result<(), Error> {
        self.record(|recorded| recorded.recorder.removed(engine_hashes, tier))
    }

    /// Reports that all blocks left a tier, or every tier for 0. Returns whether the rank became complete by that.
    pub fn cleared(&self, tier: i32) -> Result<bool, Error> {
        self.record(|recorded| {
            recorded.recorder.cleared(tier)?;
            let completed = recorded.partial && tier == 0;
            recorded.partial &= !completed;
            Ok(completed)
        })
    }

    /// Reports that events of the engine were lost. Returns whether the rank was complete before.
    pub fn events_lost(&self, removals: bool) -> Result<bool, Error> {
        self.record(|recorded| {
            let is_news = !std::mem::replace(&mut recorded.partial, true);
            if removals {
                recorded.recorder.cleared(0)?;
            }
            Ok(is_news)
        })
    }

    pub fn is_partial(&self) -> bool {
        self.lock().partial
    }

    /// Returns whether a block is resident in a tier, by what was reported.
    pub fn is_resident(&self, engine_hash: u64, tier: i32) -> Result<bool, Error> {
        Ok(self.lock().recorder.state().is_resident(engine_hash, tier)?)
    }

    /// Takes the next events to send, at most `max_bytes` of them; a heartbeat if all were sent.
    pub fn take_batch(&self, max_bytes: usize) -> TakenBatch {
        self.lock().recorder.take_batch(max_bytes, unix_ns())
    }

    pub fn has_unsent(&self) -> bool {
        self.lock().recorder.log().unsent() > 0
    }

    /// Notes that all events below an id are settled.
    pub fn settle(&self, next_event_id: u64) {
        self.settled.send_replace(next_event_id);
    }

    /// Waits until the events recorded so far are settled.
    pub async fn flush(&self) {
        let next_event_id = self.lock().recorder.state().next_event_id;
        // The sender of the channel lives as long as this rank.
        let _ = self.settled.subscribe().wait_for(|settled| *settled >= next_event_id).await;
    }

    /// Returns the state as of now.
    pub fn snapshot(&self) -> StateSnapshot {
        self.lock().recorder.snapshot()
    }

    /// Returns encoded batches with the events from an id to below `until` (0 for all); none if there are no newer ones.
    pub fn events_since(
        &self,
        event_id: u64,
        until: u64,
    ) -> Result<impl Iterator<Item = Vec<u8>> + Send + use<>, Refusal> {
        self.lock().recorder.batches(event_id, until, unix_ns())
    }

    pub fn stats(&self) -> RankStats {
        let recorded = self.lock();
        let (state, log) = (recorded.recorder.state(), recorded.recorder.log());
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RankStats {
            next_event_id: state.next_event_id,
            digest: state.digest(),
            blocks: state.len() as u64,
            partial: recorded.partial,
            unknown_removals: state.unknown_removals,
            unplaced_blocks: state.unplaced_blocks,
            batches_sent: count(&self.sent.batches),
            heartbeats_sent: count(&self.sent.heartbeats),
            bytes_sent: count(&self.sent.bytes),
            retries: count(&self.sent.retries),
            events_dropped: log.dropped + count(&self.sent.refused),
            unsent_events: log.unsent() as u64,
        }
    }
}
