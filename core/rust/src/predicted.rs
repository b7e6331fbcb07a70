//! Index of predicted blocks, with lists of all entries and of each rank's, from the least to the most recently used.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::hash::Secret;
use crate::index::tree::ranks::Name;
use crate::storage::slot_set::SlotSet;
use crate::storage::table::Table;
use crate::storage::tagmap::TagMap;
use crate::storage::trim_watermark::TrimWatermark;

/// Maximum of `max_blocks`: ids have 32 bits, and the number of entries may reach twice the bound plus one before some
/// are dropped.
const MOST_BLOCKS: usize = (u32::MAX / 2 - 2) as usize;
/// Distance of prefetching in the table, in blocks.
const AHEAD: usize = 8;

/// A predicted block of a rank, linked to its neighbours in the list of all entries and in the rank's.
#[derive(Default)]
struct Entry {
    /// Time when a request with the block was last recorded, in seconds.
    at: f64,
    place: u32,
    slot: u32,
    depth: u32,
    older: u32,
    newer: u32,
    older_of_rank: u32,
    newer_of_rank: u32,
}

#[derive(Default)]
struct Place {
    hash: u64,
    /// Ids of entries by the rank's slot.
    residents: SlotSet<u32>,
}

#[derive(Default)]
struct Rank {
    name: Name,
    entries: usize,
    oldest: u32,
    newest: u32,
}

/// Not enough memory for another entry.
#[derive(Debug)]
pub struct NoMemory;

/// Implements `kvrouter.core.interface.PredictedIndex`.
pub struct Predicted {
    ttl_seconds: f64,
    max_blocks: usize,
    pruned_blocks: usize,
    now: f64,
    entries: Table<Entry>,
    oldest: u32,
    newest: u32,
    places: Table<Place>,
    by_hash: TagMap,
    secret: Secret,
    ranks: Vec<Rank>,
    slots: HashMap<Name, u32>,
    free_slots: Vec<u32>,
    watermark: TrimWatermark,
}

impl Predicted {
    /// Requires `ttl_seconds` above 0, `max_blocks` of 1 or more, and `prune_ratio` from 0 to 1.
    pub fn new(ttl_seconds: f64, max_blocks: usize, prune_ratio: f64) -> Self {
        let max_blocks = max_blocks.min(MOST_BLOCKS);
        Self {
            ttl_seconds,
            max_blocks,
            pruned_blocks: (prune_ratio * max_blocks as f64) as usize,
            now: f64::NEG_INFINITY,
            entries: Table::new(),
            oldest: 0,
            newest: 0,
            places: Table::new(),
            by_hash: TagMap::new(),
            secret: Secret::random(),
            ranks: Vec::new(),
            slots: HashMap::new(),
            free_slots: Vec::new(),
            watermark: TrimWatermark::default(),
        }
    }

    /// Returns the number of entries, including expired ones that were not dropped yet.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether enough entries were removed that free memory should be returned to the system.
    pub fn should_trim(&mut self) -> bool {
        self.watermark.observe(self.entries.len())
    }

    /// Records that a request with these blocks was sent to the rank.
    pub fn record(&mut self, rank: Name, hashes: &[u64], now: f64) -> Result<(), NoMemory> {
        self.expire(now);
        if hashes.is_empty() {
            return Ok(());
        }
        // More than `max_blocks` blocks precede deeper ones, so deeper ones would be dropped first.
        let hashes = hashes.get(..=self.max_blocks).unwrap_or(hashes);
        let slot = self.slot(rank);
        let mut recorded = Ok(());
        // Entries that follow each other in both lists, as those of a prefix do that was recorded before.
        let mut run = (0, 0);
        for (depth, hash) in hashes.iter().enumerate().rev() {
            match self.follower(run.1) {
                id if id != 0 && self.places.at(self.entries.at(id).place).hash == *hash => run.1 = id,
                _ => {
                    self.renew(run);
                    if let Some(next) = depth.checked_sub(AHEAD).and_then(|next| hashes.get(next)) {
                        self.by_hash.prefetch(self.secret.mix(*next));
                    }
                    let Some(id) = self.find_or_add(slot, *hash) else {
                        recorded = Err(NoMemory);
                        break;
                    };
                    run = (id, id);
                }
            }
            let (now, entry) = (self.now, self.entries.at_mut(run.1));
            (entry.at, entry.depth) = (now, depth as u32);
        }
        self.renew(run);
        if self.ranks.get(slot as usize).is_some_and(|rank| rank.entries == 0) {
            self.forget_rank(slot);
        } else if recorded.is_err() {
            self.remove_rank(rank); // It has deep blocks without those before them.
        }
        if self.entries.len() > self.max_blocks {
            self.prune();
        }
        recorded
    }

    /// Returns the overlaps above 0 by rank, in blocks. They are found by halving, since a rank that holds a block holds
    /// those before it: they are recorded with it, and dropped after it.
    pub fn overlaps(&mut self, hashes: &[u64], now: f64) -> Vec<(Name, u32)> {
        self.pass(now);
        let stale = self.oldest != 0 && self.expired(self.entries.at(self.oldest));
        let holds = |entry: u32| !stale || !self.expired(self.entries.at(entry));
        let residents = |depth: usize| {
            hashes.get(depth).and_then(|hash| self.find(*hash)).map(|place| &self.places.at(place).residents)
        };
        let slots = residents(0).map_or(&[][..], SlotSet::as_slice).iter().map(|(slot, _)| *slot);
        let mut overlaps = Vec::new();
        // Ranks that hold as many blocks as the first number, and no more than the second one.
        let mut groups = vec![(0, hashes.len(), slots.collect::<Vec<_>>())];
        while let Some((least, most, slots)) = groups.pop() {
            if slots.is_empty() || most == 0 {
                continue;
            }
            if least == most {
                let names = slots.iter().filter_map(|slot| Some(self.ranks.get(*slot as usize)?.name));
                overlaps.extend(names.map(|name| (name, least as u32)));
                continue;
            }
            let middle = least.midpoint(most);
            let residents = residents(middle);
            let (more, others) =
                slots.into_iter().partition(|slot| residents.and_then(|set| set.get(*slot)).is_some_and(holds));
            groups.extend([(middle + 1, most, more), (least, middle, others)]);
        }
        overlaps
    }

    /// Returns when a request with all these blocks was last recorded for the rank; `None` if one of them is not live.
    pub fn last_use(&mut self, rank: Name, hashes: &[u64], now: f64) -> Option<f64> {
        self.pass(now);
        let (slot, place) = (*self.slots.get(&rank)?, self.find(*hashes.last()?)?);
        let entry = self.entries.at(self.places.at(place).residents.get(slot)?);
        (!self.expired(entry)).then_some(entry.at)
    }

    /// Drops a rank's entries that were last recorded at a time or before. Returns their number.
    pub fn forget_until(&mut self, rank: Name, at: f64) -> usize {
        self.drop_oldest(rank, |entry, _| entry.at <= at)
    }

    /// Drops the least recently used of a rank's entries until so many are left. Returns their number.
    pub fn keep_newest(&mut self, rank: Name, entries: usize) -> usize {
        self.drop_oldest(rank, |_, left| left > entries)
    }

    /// Returns the number of a rank's entries.
    pub fn entries_of(&self, rank: Name) -> usize {
        let rank = self.slots.get(&rank).and_then(|slot| self.ranks.get(*slot as usize));
        rank.map_or(0, |rank| rank.entries)
    }

    /// Removes a rank. Returns the number of entries dropped.
    pub fn remove_rank(&mut self, rank: Name) -> usize {
        self.drop_oldest(rank, |_, _| true)
    }

    /// Drops a rank's entries, the least recently used first, while one is to go, given the number left with it.
    /// Returns their number.
    fn drop_oldest(&mut self, rank: Name, goes: impl Fn(&Entry, usize) -> bool) -> usize {
        let Some(&slot) = self.slots.get(&rank) else { return 0 };
        let mut dropped = 0;
        while let Some(&Rank { oldest, entries, .. }) = self.ranks.get(slot as usize)
            && oldest != 0
            && goes(self.entries.at(oldest), entries)
        {
            self.drop(oldest);
            dropped += 1;
        }
        dropped
    }

    /// Estimates how many entries `record` changes for so many blocks, or `expire` for 0 blocks; at most `most`.
    pub fn work(&self, blocks: usize, now: f64, most: usize) -> usize {
        if blocks > 0 && self.entries.len().saturating_add(blocks) > self.max_blocks {
            return most;
        }
        let mut work = blocks;
        let mut id = self.oldest;
        while id != 0 && work < most && self.too_old(self.entries.at(id), now) {
            id = self.entries.at(id).newer;
            work += 1;
        }
        work.min(most)
    }

    /// Drops expired entries. Returns their number.
    pub fn expire(&mut self, now: f64) -> usize {
        self.pass(now);
        let mut dropped = 0;
        while self.oldest != 0 && self.expired(self.entries.at(self.oldest)) {
            self.drop(self.oldest);
            dropped += 1;
        }
        dropped
    }

    /// Advances the clock, which never goes backwards.
    fn pass(&mut self, now: f64) {
        if now > self.now {
            self.now = now;
        }
    }

    fn expired(&self, entry: &Entry) -> bool {
        self.too_old(entry, self.now)
    }

    fn too_old(&self, entry: &Entry, now: f64) -> bool {
        let age = now - entry.at;
        // The difference of two infinities is no age: such entries are expired.
        age.is_nan() || age >= self.ttl_seconds
    }

    #[inline]
    fn find(&self, hash: u64) -> Option<u32> {
        self.by_hash.find(self.secret.mix(hash), |id| self.places.at(id).hash == hash)
    }

    fn slot(&mut self, name: Name) -> u32 {
        if let Some(slot) = self.slots.get(&name) {
            return *slot;
        }
        let slot = self.free_slots.pop().unwrap_or(self.ranks.len() as u32);
        if slot as usize == self.ranks.len() {
            self.ranks.push(Rank::default());
        }
        if let Some(rank) = self.ranks.get_mut(slot as usize) {
            *rank = Rank { name, ..Rank::default() };
        }
        self.slots.insert(name, slot);
        slot
    }

    fn forget_rank(&mut self, slot: u32) {
        if let Some(rank) = self.ranks.get(slot as usize) {
            self.slots.remove(&rank.name);
            self.free_slots.push(slot);
        }
    }

    /// Returns the entry of a rank at a place. Adds it as the most recently used if it is missing; None without memory.
    fn find_or_add(&mut self, slot: u32, hash: u64) -> Option<u32> {
        let place = match self.find(hash) {
            Some(place) => place,
            None => self.new_place(hash)?,
        };
        if let Some(id) = self.places.at(place).residents.get(slot) {
            return Some(id);
        }
        let Some(id) = self.entries.add(Entry { place, slot, ..Entry::default() }, u32::MAX) else {
            self.forget_not_resident(place);
            return None;
        };
        self.places.at_mut(place).residents.set(slot, id);
        if let Some(rank) = self.ranks.get_mut(slot as usize) {
            rank.entries += 1;
        }
        self.append(id, id);
        Some(id)
    }

    /// Returns the entry that follows another one in both lists; 0 if there is none.
    fn follower(&self, id: u32) -> u32 {
        let entry = self.entries.at(id);
        if id != 0 && entry.newer == entry.newer_of_rank { entry.newer } else { 0 }
    }

    /// Makes entries that follow each other in both lists the most recently used ones.
    fn renew(&mut self, (first, last): (u32, u32)) {
        if last != 0 && last != self.newest {
            self.unlink(first, last);
            self.append(first, last);
        }
    }

    /// Adds entries that follow each other to the end of both lists.
    fn append(&mut self, first: u32, last: u32) {
        let Some(rank) = self.ranks.get_mut(self.entries.at(first).slot as usize) else { return };
        let (older, older_of_rank) = (self.newest, rank.newest);
        (self.newest, rank.newest) = (last, last);
        if older_of_rank == 0 {
            rank.oldest = first;
        } else {
            self.entries.at_mut(older_of_rank).newer_of_rank = first;
        }
        if older == 0 {
            self.oldest = first;
        } else {
            self.entries.at_mut(older).newer = first;
        }
        let entry = self.entries.at_mut(first);
        (entry.older, entry.older_of_rank) = (older, older_of_rank);
        let entry = self.entries.at_mut(last);
        (entry.newer, entry.newer_of_rank) = (0, 0);
    }

    /// Takes entries that follow each other out of both lists.
    fn unlink(&mut self, first: u32, last: u32) {
        let &Entry { slot, older, older_of_rank, .. } = self.entries.at(first);
        let &Entry { newer, newer_of_rank, .. } = self.entries.at(last);
        if older == 0 {
            self.oldest = newer;
        } else {
            self.entries.at_mut(older).newer = newer;
        }
        if newer == 0 {
            self.newest = older;
        } else {
            self.entries.at_mut(newer).older = older;
        }
        let Some(rank) = self.ranks.get_mut(slot as usize) else { return };
        if older_of_rank == 0 {
            rank.oldest = newer_of_rank;
        } else {
            self.entries.at_mut(older_of_rank).newer_of_rank = newer_of_rank;
        }
        if newer_of_rank == 0 {
            rank.newest = older_of_rank;
        } else {
            self.entries.at_mut(newer_of_rank).older_of_rank = older_of_rank;
        }
    }

    fn drop(&mut self, id: u32) {
        self.unlink(id, id);
        let Entry { place, slot, .. } = self.entries.take(id);
        self.places.at_mut(place).residents.remove(slot);
        self.forget_not_resident(place);
        if let Some(rank) = self.ranks.get_mut(slot as usize) {
            rank.entries -= 1;
            if rank.entries == 0 {
                self.forget_rank(slot);
            }
        }
        if self.entries.len() == 0 {
            self.entries.shrink();
            self.places.shrink();
            self.by_hash.shrink();
        }
    }

    fn new_place(&mut self, hash: u64) -> Option<u32> {
        let id = self.places.add(Place { hash, ..Place::default() }, u32::MAX)?;
        let (places, secret) = (&self.places, self.secret);
        if self.by_hash.insert(secret.mix(hash), id, |id| secret.mix(places.at(id).hash)) {
            return Some(id);
        }
        self.places.take(id);
        None
    }

    fn forget_not_resident(&mut self, id: u32) {
        let place = self.places.at(id);
        if place.residents.as_slice().is_empty() {
            let (places, secret) = (&self.places, self.secret);
            self.by_hash.remove(secret.mix(place.hash), id, |id| secret.mix(places.at(id).hash));
            self.places.take(id);
        }
    }

    /// Drops the least recently used entries until `pruned_blocks` are left; of equally old ones, deeper ones first.
    fn prune(&mut self) {
        let mut excess = self.entries.len() - self.pruned_blocks;
        while excess > 0 && self.oldest != 0 {
            let at = self.entries.at(self.oldest).at;
            let mut same = Vec::new();
            let mut id = self.oldest;
            while id != 0 && self.entries.at(id).at == at {
                same.push(id);
                id = self.entries.at(id).newer;
            }
            if same.len() > excess {
                same.sort_by_key(|id| Reverse(self.entries.at(*id).depth)); // stable: at one depth, older ones first
                same.truncate(excess);
            }
            excess -= same.len();
            for id in same {
                self.drop(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_leaves_nothing() {
        let mut index = Predicted::new(10.0, 1000, 0.8);
        for worker in 0..50u64 {
            let hashes: Vec<u64> = (0..worker).collect();
            index.record((worker, 0), &hashes, worker as f64 / 10.0).unwrap();
        }
        assert!(index.len() <= 1000);
        assert_eq!((index.work(0, 5.0, 10), index.work(3, 5.0, 10), index.work(3, 100.0, 10)), (0, 3, 10));
        assert_eq!((index.work(999, 5.0, 2000), index.work(0, 100.0, 2000)), (2000, index.len()));
        index.remove_rank((49, 0));
        index.expire(100.0);
        assert_eq!((index.len(), index.places.len(), index.by_hash.bytes()), (0, 0, 0));
        assert_eq!((index.slots.len(), index.free_slots.len()), (0, index.ranks.len()));
        assert_eq!((index.oldest, index.newest), (0, 0));
    }

    #[test]
    fn a_prompt_over_the_bound_takes_no_more_room_than_the_bound() {
        let mut index = Predicted::new(10.0, 100, 1.0);
        let hashes: Vec<u64> = (0..100_000).collect();
        index.record((1, 0), &hashes, 0.0).unwrap();
        assert_eq!((index.len(), index.overlaps(&hashes, 0.0)), (100, vec![((1, 0), 100)]));
        assert!(index.entries.bytes() < 100_000);
    }
}
