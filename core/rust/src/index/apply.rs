//! Applies batches of events: cursors, incarnations, gaps, and the change of each event.

use std::collections::BTreeMap;

use crate::index::Index;
use crate::index::store::Refused;
use crate::index::tree::nodes::RankTier;
use crate::index::tree::ranks::{Counting, Name, Rank};
use crate::wire::{Batch, Change, Event, Malformed, TIERS};

/// Maximum number of blocks in one event.
const MAX_EVENT_BLOCKS: usize = 1 << 16;
/// Maximum number of reasons in a summary.
const MAX_REASONS: usize = 16;
const SET: i32 = 2;

/// The result of applying a batch; see `kvrouter.core.interface.ApplySummary`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub rank: Name,
    pub applied: u64,
    pub stored_blocks: u64,
    pub removed_blocks: u64,
    pub duplicates: u64,
    pub fenced: u64,
    pub gap: Option<(u64, u64)>,
    pub unknown_parents: u64,
    pub unknown_removals: u64,
    /// Ids of rejected events, with reasons.
    pub rejected: Vec<(u64, &'static str)>,
    pub unparsable: &'static str,
    pub next_event_id: u64,
    pub incarnation: u64,
    pub new_incarnation: bool,
    pub digest_differs: bool,
    /// Number of entries dropped because the rank was evicted.
    pub evicted_blocks: Option<u64>,
    /// Other ranks that were evicted to make room, with the number of their dropped entries.
    pub evicted_others: Vec<(Name, u64)>,
}

/// Why an event was not applied as usual.
enum Odd {
    UnknownParent,
    Rejected(&'static str),
}

impl Index {
    /// Applies an encoded KvEventBatch and compares its digest.
    pub fn apply(&mut self, message: &[u8]) -> Summary {
        match Batch::parse(message) {
            Ok(batch) => {
                let summary = self.apply_events(&batch);
                self.compare_digest(&batch, summary)
            }
            Err(Malformed(why)) => Summary { unparsable: why, ..Summary::default() },
        }
    }

    /// Applies the events of a batch. `compare_digest` must follow, before the rank changes again.
    pub(crate) fn apply_events(&mut self, batch: &Batch<'_>) -> Summary {
        let name = (batch.worker_id, batch.dp_rank);
        let mut summary = Summary { rank: name, ..Summary::default() };
        let Some(slot) = self.rank_slot(name, batch.incarnation) else {
            return Summary { unparsable: "the index has its maximum number of ranks", ..summary };
        };
        self.apply_to(slot, batch, &mut summary);
        if let Some(rank) = self.ranks.get(slot) {
            summary.next_event_id = rank.next_event_id;
            summary.incarnation = rank.incarnation;
        }
        self.ranks.weigh(slot);
        self.scratch.trim();
        self.give_back(summary.new_incarnation);
        summary
    }

    /// Completes the summary of a batch that was just applied: whether its digest differs from the index's. It only
    /// reads, and takes long for large ranks.
    pub(crate) fn compare_digest(&self, batch: &Batch<'_>, summary: Summary) -> Summary {
        let Some(digest) = batch.digest.filter(|_| self.checks_digest(batch)) else { return summary };
        let Some(slot) = self.ranks.slot_of(summary.rank) else { return summary };
        let comparable = self.ranks.get(slot).is_some_and(|rank| {
            batch.incarnation == rank.incarnation && batch.next_event_id == rank.next_event_id && !rank.partial()
        });
        let digest_differs = comparable && summary.gap.is_none() && self.digest(slot) != digest;
        Summary { digest_differs, ..summary }
    }

    /// Returns whether the digest of a batch must be compared.
    pub(crate) fn checks_digest(&self, batch: &Batch<'_>) -> bool {
        batch.digest.is_some() && (batch.events.is_empty() || self.check_digests)
    }

    fn apply_to(&mut self, slot: u32, batch: &Batch<'_>, summary: &mut Summary) {
        let Some(rank) = self.ranks.get(slot) else { return };
        if batch.incarnation < rank.incarnation {
            summary.fenced = batch.events.len().max(1) as u64;
            return;
        }
        if batch.incarnation > rank.incarnation {
            summary.new_incarnation = true;
            self.drop_resident(slot, None);
            if let Some(rank) = self.ranks.get_mut(slot) {
                *rank = Rank::new(rank.name, batch.incarnation, 0);
            }
        }
        if let Some(rank) = self.ranks.get_mut(slot) {
            rank.counting = if batch.counting == SET { Counting::Set } else { Counting::Counted };
        }
        for event in &batch.events {
            let Some(rank) = self.ranks.get(slot) else { return };
            if event.id < rank.next_event_id {
                summary.duplicates += 1;
                continue;
            }
            if event.id > rank.next_event_id {
                summary.gap = Some((rank.next_event_id, event.id));
                break;
            }
            let odd = if event.id == u64::MAX {
                Err(Odd::Rejected("expected an id below 2^64 - 1"))
            } else {
                self.apply_event(slot, event, summary)
            };
            let Some(rank) = self.ranks.get_mut(slot) else { return };
            rank.next_event_id = event.id.saturating_add(1);
            match odd {
                Ok(()) => summary.applied += 1,
                Err(Odd::UnknownParent) => {
                    rank.missing = true;
                    summary.unknown_parents += 1;
                }
                Err(Odd::Rejected(why)) => {
                    rank.missing = true;
                    if summary.rejected.len() < MAX_REASONS {
                        summary.rejected.push((event.id, why));
                    }
                }
            }
        }
        let Some(rank) = self.ranks.get(slot) else { return };
        if summary.gap.is_none() && batch.next_event_id > rank.next_event_id {
            summary.gap = Some((rank.next_event_id, batch.next_event_id));
        }
    }

    fn apply_event(&mut self, slot: u32, event: &Event<'_>, summary: &mut Summary) -> Result<(), Odd> {
        self.changes += 1;
        let tier = match event.tier {
            0 => 0,
            tier if tier as usize <= TIERS => tier as u32 - 1,
            _ => return Err(Odd::Rejected("it has an unknown tier")),
        };
        let Some(rank) = self.ranks.get(slot) else { return Ok(()) };
        let (counting, evicted) = (rank.counting, rank.evicted);
        let rank_tier = RankTier::new(slot, tier);
        match &event.change {
            Change::None => Err(Odd::Rejected("it has no change")),
            Change::Stored { parent, engines, locals } => {
                if engines.len() > MAX_EVENT_BLOCKS || locals.len() > MAX_EVENT_BLOCKS {
                    return Err(Odd::Rejected("it has more than 65536 blocks"));
                }
                let mut engine_hashes = std::mem::take(&mut self.scratch.engines);
                let mut local_hashes = std::mem::take(&mut self.scratch.locals);
                engines.copy_to(&mut engine_hashes);
                locals.copy_to(&mut local_hashes);
                let stored = match self.check_chain(*parent, &engine_hashes, &local_hashes) {
                    Ok(()) if !evicted => self.store(rank_tier, counting, *parent, &engine_hashes, &local_hashes),
                    checked => checked,
                };
                if matches!(stored, Err(Refused::UnknownParent)) {
                    // Their old positions are wrong, and their new ones are unknown.
                    for tier in 0..TIERS as u32 {
                        self.remove(RankTier::new(slot, tier), Counting::Set, &engine_hashes);
                    }
                }
                self.scratch.engines = engine_hashes;
                self.scratch.locals = local_hashes;
                match stored {
                    Ok(()) if evicted => {}
                    Ok(()) => {
                        self.make_room(slot, summary);
                        if summary.evicted_blocks.is_none() {
                            summary.stored_blocks += engines.len() as u64;
                        }
                    }
                    Err(Refused::UnknownParent) => return Err(Odd::UnknownParent),
                    Err(Refused::Malformed(why)) => return Err(Odd::Rejected(why)),
                    Err(Refused::Exhausted) => {
                        summary.evicted_blocks = Some(self.evict(slot));
                        return Err(Odd::Rejected("there is not enough memory"));
                    }
                }
                Ok(())
            }
            Change::Removed { engines } => {
                if engines.len() == 0 {
                    return Err(Odd::Rejected("it has no blocks"));
                }
                if engines.len() > MAX_EVENT_BLOCKS {
                    return Err(Odd::Rejected("it has more than 65536 blocks"));
                }
                if evicted {
                    return Ok(());
                }
                let mut engine_hashes = std::mem::take(&mut self.scratch.engines);
                engines.copy_to(&mut engine_hashes);
                let removed = self.remove(rank_tier, counting, &engine_hashes);
                self.scratch.engines = engine_hashes;
                summary.removed_blocks += removed;
                summary.unknown_removals += engines.len() as u64 - removed;
                Ok(())
            }
            Change::Cleared => {
                let all = event.tier == 0;
                self.drop_resident(slot, (!all).then_some(tier));
                if let Some(rank) = self.ranks.get_mut(slot)
                    && all
                {
                    rank.missing = false;
                    rank.evicted = false;
                }
                Ok(())
            }
        }
    }

    /// Evicts ranks until the index keeps its bounds: the largest rank of the worker with the most entries, so that a
    /// worker that floods the index loses its own first; if that is not enough, the rank that has just grown.
    pub(crate) fn make_room(&mut self, grown: u32, summary: &mut Summary) {
        if !self.over_bounds(grown) {
            return;
        }
        let largest = self.largest_rank(grown);
        if largest != grown {
            let name = self.ranks.get(largest).map_or((0, 0), |rank| rank.name);
            summary.evicted_others.push((name, self.evict(largest)));
            if !self.over_bounds(largest) {
                return;
            }
        }
        summary.evicted_blocks = Some(self.evict(grown));
    }

    /// Returns the largest rank of the worker with the most entries. Among equals, ``grown`` and its worker.
    fn largest_rank(&self, grown: u32) -> u32 {
        let entries = |slot: u32| self.ranks.get(slot).map_or(0, |rank| rank.entries);
        let mut workers: BTreeMap<u64, u64> = BTreeMap::new();
        for ((worker, _), slot) in self.ranks.in_order() {
            *workers.entry(worker).or_default() += entries(slot);
        }
        let Some(own) = self.ranks.get(grown).map(|rank| rank.name.0) else { return grown };
        let most = |of: &BTreeMap<u64, u64>, worker: u64| of.get(&worker).copied().unwrap_or(0);
        let chosen = workers
            .keys()
            .fold(own, |best, &worker| if most(&workers, worker) > most(&workers, best) { worker } else { best });
        let ranks = self.ranks.in_order().filter(|((worker, _), _)| *worker == chosen).map(|(_, slot)| slot);
        let first = if chosen == own { Some(grown) } else { None };
        first
            .into_iter()
            .chain(ranks)
            .reduce(|best, slot| if entries(slot) > entries(best) { slot } else { best })
            .unwrap_or(grown)
    }

    /// Empties a rank with which the index exceeds a bound. Returns the number of entries dropped.
    pub(crate) fn evict(&mut self, slot: u32) -> u64 {
        let dropped = self.drop_resident(slot, None);
        if let Some(rank) = self.ranks.get_mut(slot) {
            rank.evicted = true;
        }
        self.give_back(true);
        dropped
    }
}
