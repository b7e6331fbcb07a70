//! Records the blocks of one rank, and hands out what a publisher sends of them.

use std::collections::HashMap;
use std::sync::Arc;

use super::batch::{BatchHead, MAX_BATCH_BYTES, encode_batch};
use super::blocks::{Block, Error, NumberedEvent, Scope};
use super::chunks::StateSnapshot;
use super::event_log::EventLog;
use super::state::RankState;
use crate::wire::RankState as Dumped;

/// The CopyCounting of ranks whose events describe a set of blocks.
const COPY_COUNTING_SET: i32 = 2;

/// An encoded KvEventBatch with the events from `first_event_id` to below `next_event_id`; none in a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TakenBatch {
    pub first_event_id: u64,
    pub next_event_id: u64,
    pub encoded: Vec<u8>,
}

/// Scope and parts of blocks, which their records in the contract lack.
pub type BlockNote = (Option<Arc<Scope>>, u32, Vec<u64>);

/// The blocks of one rank, and the log of the events that changed them.
pub struct EventRecorder {
    head: BatchHead,
    state: RankState,
    log: EventLog,
    /// Events since `begin`, which `commit` appends to the log.
    pending: Option<Vec<NumberedEvent>>,
}

impl EventRecorder {
    /// `max_events` and `max_bytes` limit the log.
    pub fn new(head: BatchHead, max_events: usize, max_bytes: usize) -> Self {
        let state = RankState::new(head.incarnation, head.counting != COPY_COUNTING_SET);
        Self { head, state, log: EventLog::new(max_events, max_bytes), pending: None }
    }

    pub fn head(&self) -> &BatchHead {
        &self.head
    }

    pub fn state(&self) -> &RankState {
        &self.state
    }

    pub fn log(&self) -> &EventLog {
        &self.log
    }

    /// Records a chain of blocks; see `RankState::stored`.
    #[allow(clippy::too_many_arguments)] // one report of an engine, as it comes
    pub fn stored(
        &mut self,
        engine_hashes: &[u64],
        locals: &[u64],
        parent: Option<u64>,
        tier: i32,
        scope: Option<Arc<Scope>>,
        new_copies: bool,
        parts: u32,
    ) -> Result<(), Error> {
        let events = self.state.stored(engine_hashes, locals, parent, tier, scope, new_copies, parts)?;
        self.extend(events);
        Ok(())
    }

    /// Records a tier of resident blocks; see `RankState::stored_in_tier`.
    pub fn stored_in_tier(&mut self, engine_hashes: &[u64], tier: i32) -> Result<(), Error> {
        let events = self.state.stored_in_tier(engine_hashes, tier)?;
        self.extend(events);
        Ok(())
    }

    /// Records removed copies; see `RankState::removed`.
    pub fn removed(&mut self, engine_hashes: &[u64], tier: i32) -> Result<(), Error> {
        let events = self.state.removed(engine_hashes, tier)?;
        self.extend(events);
        Ok(())
    }

    /// Records an emptied tier, or all of them for 0.
    pub fn cleared(&mut self, tier: i32) -> Result<(), Error> {
        let event = self.state.cleared(tier)?;
        self.extend(vec![event]);
        Ok(())
    }

    /// Begins a group of reports, which `roll_back` can undo.
    pub fn begin(&mut self) {
        self.state.begin();
        self.pending = Some(Vec::new());
    }

    /// Ends the group: its events may be sent.
    pub fn commit(&mut self) {
        self.state.commit();
        let events = self.pending.take().unwrap_or_default();
        self.log.extend(events);
    }

    /// Undoes the group.
    pub fn roll_back(&mut self) {
        self.state.roll_back();
        self.pending = None;
    }

    /// Takes the next events to send: at most `max_bytes` but at least one. Returns a heartbeat if all were taken.
    pub fn take_batch(&mut self, max_bytes: usize, published_unix_ns: u64) -> TakenBatch {
        let events = self.log.take(max_bytes.min(MAX_BATCH_BYTES));
        let next_event_id = events.last().map_or(self.state.next_event_id, |last| last.id + 1);
        let digest = events.last().map_or(self.state.digest(), |last| last.digest);
        TakenBatch {
            first_event_id: events.first().map_or(next_event_id, |first| first.id),
            next_event_id,
            encoded: encode_batch(&self.head, &events, next_event_id, digest, published_unix_ns),
        }
    }

    /// Returns encoded batches with the events from `event_id` to below `until` (0 for all); none if there are no newer
    /// ones. Later changes do not affect them.
    pub fn batches(
        &self,
        event_id: u64,
        until: u64,
        published_unix_ns: u64,
    ) -> Result<impl Iterator<Item = Vec<u8>> + Send + use<>, Error> {
        let is_newest = event_id == self.state.next_event_id;
        let runs = if is_newest { Vec::new() } else { self.log.since(event_id, until, MAX_BATCH_BYTES)? };
        let head = self.head.clone();
        Ok(runs.into_iter().filter_map(move |events| {
            let last = events.last()?;
            Some(encode_batch(&head, &events, last.id + 1, last.digest, published_unix_ns))
        }))
    }

    /// Returns the state as of now, from which its chunks are encoded later.
    pub fn snapshot(&self) -> StateSnapshot {
        self.state.snapshot(self.head.counting)
    }

    /// Returns the notes on all blocks, each scope once.
    pub fn notes(&self) -> Vec<BlockNote> {
        notes(self.state.blocks())
    }

    /// Fills an empty record from a part of a dump with `total` blocks; parents precede children.
    pub fn load(&mut self, part: &Dumped, total: usize) {
        self.state.load(part.cursor.map_or(0, |(_, next_event_id)| next_event_id), &part.blocks, total);
    }

    /// Applies notes to resident blocks; others are ignored.
    pub fn annotate(&mut self, notes: Vec<BlockNote>) {
        for (scope, parts, engine_hashes) in notes {
            for engine_hash in engine_hashes {
                self.state.annotate(engine_hash, scope.clone(), parts);
            }
        }
    }

    /// Appends events: to the group, or to the log if there is none.
    fn extend(&mut self, events: Vec<NumberedEvent>) {
        match &mut self.pending {
            Some(pending) => pending.extend(events),
            None => self.log.extend(events),
        }
    }
}

fn notes<'a>(blocks: impl Iterator<Item = (u64, &'a Block)>) -> Vec<BlockNote> {
    let mut notes: HashMap<_, Vec<u64>> = HashMap::new();
    for (engine_hash, block) in blocks.filter(|(_, block)| block.notes.is_some()) {
        notes.entry((block.scope(), block.parts())).or_default().push(engine_hash);
    }
    notes.into_iter().map(|((scope, parts), engine_hashes)| (scope, parts, engine_hashes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorder() -> EventRecorder {
        let head = BatchHead { worker_id: 1, dp_rank: 0, incarnation: 7, block_size: 4, counting: 1 };
        EventRecorder::new(head, 100, 1 << 20)
    }

    #[test]
    fn a_heartbeat_follows_the_last_batch() {
        let mut recorder = recorder();
        recorder.stored(&[1, 2], &[5, 6], None, 1, None, true, 1).unwrap();
        recorder.removed(&[2], 1).unwrap();
        let batch = recorder.take_batch(usize::MAX, 9);
        assert_eq!((batch.first_event_id, batch.next_event_id), (0, 2));
        let heartbeat = recorder.take_batch(usize::MAX, 9);
        assert_eq!((heartbeat.first_event_id, heartbeat.next_event_id), (2, 2));
        assert!(heartbeat.encoded.len() < batch.encoded.len());
        assert_eq!(recorder.batches(0, 0, 9).unwrap().collect::<Vec<_>>(), [batch.encoded]);
        assert_eq!(recorder.batches(2, 0, 9).unwrap().count(), 0);
        assert!(recorder.batches(3, 0, 9).is_err());
    }

    #[test]
    fn a_group_is_sent_once_it_is_committed() {
        let mut recorder = recorder();
        let scope = Some(Arc::new(Scope { tenant: "t".into(), ..Scope::default() }));
        recorder.begin();
        recorder.stored(&[1], &[5], None, 1, scope.clone(), true, 1).unwrap();
        recorder.roll_back();
        recorder.begin();
        recorder.stored(&[2], &[5], None, 1, scope.clone(), true, 1).unwrap();
        assert_eq!(recorder.log().unsent(), 0);
        recorder.commit();
        assert_eq!(recorder.notes(), vec![(scope, 1, vec![2])]);
        assert_eq!(recorder.take_batch(usize::MAX, 0).first_event_id, 0);
        assert_eq!(recorder.state().len(), 1);
    }
}
