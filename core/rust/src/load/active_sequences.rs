//! Load that requests in flight put on ranks: counted as they come and go, never counted over.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::hash::Secret;
use crate::index::tree::ranks::Name;
use crate::load::active_blocks::{ActiveBlocks, Piece, without_repeats};
use crate::load::rank_loads::{Key, Load, RankLoads, Row, word};
use crate::load::time_in_flight::TimeInFlight;
use crate::load::tombstones::Tombstones;
use crate::storage::trim_watermark::TrimWatermark;

/// The content of a booking request.
pub struct Request<'a> {
    pub key: Key,
    /// None for a name that no rank can have.
    pub rank: Option<Name>,
    pub prompt_tokens: u64,
    pub prefill_tokens: u64,
    pub blocks: Blocks<'a>,
    /// Number of sequences that the engine generates from the prompt.
    pub sequences: u64,
    /// Seconds.
    pub now: f64,
}

/// The blocks of a booking that count as active.
pub enum Blocks<'a> {
    /// None.
    Untracked,
    /// All of them, shared with no other booking.
    Unique,
    /// These, by sequence hash, once for all bookings of the rank; and the blocks after the prompt's full ones.
    Shared(&'a [u64]),
}

/// The outcome of `book`.
#[derive(Debug, PartialEq, Eq)]
pub enum Booked {
    /// With the number of prompts to compute on its rank, the new one included.
    Yes(usize),
    /// Booked already, or freed.
    Known,
    UnknownRank,
    /// There is the maximum number of bookings.
    Full,
    NoMemory,
}

struct Live {
    rank: Name,
    slot: u32,
    /// Number of earlier bookings.
    order: u64,
    prompt_tokens: u64,
    prefill_tokens: u64,
    output_tokens: u64,
    sequences: u64,
    prefilled: bool,
    tracked: bool,
    unique: bool,
    pieces: Box<[Piece]>,
}

impl Live {
    /// Number of blocks that count only for this booking.
    fn private_blocks(&self, block_size: u64) -> u128 {
        if !self.tracked {
            return 0;
        }
        let tokens = u128::from(self.prompt_tokens) + u128::from(self.output_tokens);
        let shared = if self.unique { 0 } else { self.prompt_tokens / block_size };
        tokens.div_ceil(u128::from(block_size)) - u128::from(shared)
    }
}

/// Load of all ranks, in order of (worker_id, dp_rank). Sums above 2^63 - 1 are given as 2^63 - 1.
pub struct Columns {
    /// The same slice as in the previous result, unless the ranks have changed.
    pub ranks: Arc<[Name]>,
    /// The columns of `kvrouter.core.interface.LoadColumns`, one after the other, in 64-bit words.
    pub words: Vec<[u8; 8]>,
}

/// The ranks in order, and their slots.
struct Order {
    names: Arc<[Name]>,
    slots: Vec<u32>,
}

/// The bookings by key, and the load of their ranks.
pub struct Sequences {
    block_size: u64,
    max_bookings: usize,
    loads: RankLoads,
    slots: BTreeMap<Name, u32>,
    free_slots: Vec<u32>,
    /// None if the ranks have changed since they were last read.
    order: Option<Order>,
    bookings: HashMap<Arc<Key>, Live>,
    time_in_flight: TimeInFlight,
    booked: u64,
    freed: Tombstones<Key>,
    active: ActiveBlocks,
    watermark: TrimWatermark,
    secret: Secret,
}

impl Sequences {
    /// Requires a `block_size` of 1 or more.
    pub fn new(block_size: u64, max_bookings: usize, tombstones: usize) -> Self {
        Self {
            block_size: block_size.max(1),
            // The number of a rank's bookings that use a block has 32 bits.
            max_bookings: max_bookings.min(u32::MAX as usize),
            loads: RankLoads::default(),
            slots: BTreeMap::new(),
            free_slots: Vec::new(),
            order: None,
            bookings: HashMap::new(),
            time_in_flight: TimeInFlight::new(),
            booked: 0,
            freed: Tombstones::new(tombstones),
            active: ActiveBlocks::new(),
            watermark: TrimWatermark::default(),
            secret: Secret::random(),
        }
    }

    /// Returns the number of live bookings.
    pub fn len(&self) -> usize {
        self.bookings.len()
    }

    /// Returns the maximum number of live bookings.
    pub fn max_bookings(&self) -> usize {
        self.max_bookings
    }

    /// Returns the number of tokens in a block.
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Adds a rank without load.
    pub fn add_rank(&mut self, rank: Name) {
        if self.slots.contains_key(&rank) {
            return;
        }
        let slot = self.free_slots.pop().unwrap_or_else(|| self.loads.add());
        self.slots.insert(rank, slot);
        self.order = None;
    }

    /// Removes a rank. Returns its bookings, in the order in which they were booked.
    pub fn remove_rank(&mut self, rank: Name) -> Vec<Arc<Key>> {
        let Some(slot) = self.slots.remove(&rank) else { return Vec::new() };
        self.order = None;
        let keys: Vec<Arc<Key>> =
            self.loads.get(slot).map(|load| load.live.values().cloned().collect()).unwrap_or_default();
        for key in &keys {
            self.end(Arc::clone(key), 0.0);
        }
        self.loads.change(slot, |load| *load = Load::default());
        self.free_slots.push(slot);
        keys
    }

    /// Adds a booking.
    pub fn book(&mut self, request: Request<'_>) -> Booked {
        if self.freed.contains(&request.key) {
            return Booked::Known;
        }
        let bookings = self.bookings.len();
        let key = Arc::new(request.key);
        let Entry::Vacant(booking) = self.bookings.entry(Arc::clone(&key)) else { return Booked::Known };
        let Some(rank) = request.rank else { return Booked::UnknownRank };
        let Some(slot) = self.slots.get(&rank).copied() else { return Booked::UnknownRank };
        if bookings >= self.max_bookings {
            return Booked::Full;
        }
        let shared = match request.blocks {
            Blocks::Shared(hashes) => hashes,
            Blocks::Untracked | Blocks::Unique => &[],
        };
        let distinct = without_repeats(shared, &self.secret);
        let distinct = distinct.as_deref().unwrap_or(shared);
        let Some((pieces, gained)) = self.active.add(distinct, slot) else { return Booked::NoMemory };
        let live = Live {
            rank,
            slot,
            order: self.booked,
            prompt_tokens: request.prompt_tokens,
            prefill_tokens: request.prefill_tokens,
            output_tokens: 0,
            sequences: request.sequences,
            prefilled: false,
            tracked: !matches!(request.blocks, Blocks::Untracked),
            unique: matches!(request.blocks, Blocks::Unique),
            pieces,
        };
        self.booked += 1;
        let prompts = self.loads.change(slot, |load| {
            load.shared_blocks += gained;
            load.private_blocks += live.private_blocks(self.block_size);
            load.prefill_tokens += u128::from(live.prefill_tokens);
            load.sequences += live.sequences;
            if live.prefill_tokens > 0 {
                load.begin_prompt(live.order, live.prefill_tokens, request.now);
            }
            load.peaks.1 = load.peaks.1.max(load.sequences);
            load.live.insert(live.order, key);
            load.prompts.len()
        });
        self.time_in_flight.count(bookings, request.now);
        booking.insert(live);
        Booked::Yes(prompts.unwrap_or_default())
    }

    /// Returns whether enough entries were removed that free memory should be returned to the system.
    pub fn should_trim(&mut self) -> bool {
        self.watermark.observe(self.active.len())
    }

    /// Returns the rank of a live booking.
    pub fn rank(&self, key: &Key) -> Option<Name> {
        self.bookings.get(key).map(|live| live.rank)
    }

    /// Returns the number of shared blocks of a live booking.
    pub fn blocks_of(&self, key: &Key) -> usize {
        self.bookings.get(key).map_or(0, |live| live.pieces.iter().map(Piece::blocks).sum())
    }

    /// Returns the number of distinct blocks of a rank.
    pub fn blocks_of_rank(&self, rank: Name) -> usize {
        self.load_of(rank).map_or(0, |load| load.shared_blocks as usize)
    }

    /// Returns the number of booked sequences of a rank.
    pub fn sequences_of_rank(&self, rank: Name) -> u64 {
        self.load_of(rank).map_or(0, |load| load.sequences)
    }

    /// Returns the most booked sequences of a rank since the call before the last.
    pub fn most_sequences(&mut self, rank: Name) -> u64 {
        let Some(slot) = self.slots.get(&rank).copied() else { return 0 };
        let most = self.loads.change(slot, |load| {
            let most = load.peaks.0.max(load.peaks.1).max(load.sequences);
            load.peaks = (load.peaks.1, load.sequences);
            most
        });
        most.unwrap_or_default()
    }

    /// Returns the mean time from booking to end in seconds; infinite while too few have ended.
    pub fn seconds_in_flight(&self) -> f64 {
        self.time_in_flight.seconds()
    }

    fn load_of(&self, rank: Name) -> Option<&Load> {
        self.slots.get(&rank).and_then(|slot| self.loads.get(*slot))
    }

    /// Subtracts the prefill tokens of a booking. Returns whether it is live.
    pub fn prefill_complete(&mut self, key: &Key, now: f64) -> bool {
        let Some(live) = self.bookings.get_mut(key) else { return false };
        if !std::mem::replace(&mut live.prefilled, true) {
            self.loads.change(live.slot, |load| {
                load.prefill_tokens -= u128::from(live.prefill_tokens);
                load.end_prompt(live.order, now);
            });
        }
        true
    }

    /// Raises a booking's output tokens to `tokens`. Returns whether it is live.
    pub fn output_tokens(&mut self, key: &Key, tokens: u64) -> bool {
        let Some(live) = self.bookings.get_mut(key) else { return false };
        if tokens > live.output_tokens {
            self.loads.change(live.slot, |load| {
                load.private_blocks -= live.private_blocks(self.block_size);
                live.output_tokens = tokens;
                load.private_blocks += live.private_blocks(self.block_size);
            });
        }
        true
    }

    /// Frees a booking and adds a tombstone for its key. Returns its rank if it was live.
    pub fn free(&mut self, key: Arc<Key>, now: f64) -> Option<Name> {
        let bookings = self.bookings.len();
        let rank = self.end(key, now)?;
        self.time_in_flight.end(bookings, now);
        Some(rank)
    }

    fn end(&mut self, key: Arc<Key>, now: f64) -> Option<Name> {
        let live = self.bookings.remove(&key);
        self.freed.put(key);
        let live = live?;
        let lost = self.active.release(&live.pieces, live.slot);
        self.loads.change(live.slot, |load| {
            load.shared_blocks -= lost;
            load.private_blocks -= live.private_blocks(self.block_size);
            if !live.prefilled {
                load.prefill_tokens -= u128::from(live.prefill_tokens);
                load.end_prompt(live.order, now);
            }
            load.sequences -= live.sequences;
            load.live.remove(&live.order);
        });
        if self.bookings.len() * 8 < self.bookings.capacity() {
            self.bookings.shrink_to(self.bookings.len() * 2);
        }
        Some(live.rank)
    }

    /// Returns the load of every rank, with the blocks of a prompt and `tail` private ones added.
    pub fn loads(&mut self, hashes: &[u64], tail: u64) -> Columns {
        let leading = self.active.leading(hashes, self.loads.len());
        let added = hashes.len() as u128 + u128::from(tail);
        let order = self.order.get_or_insert_with(|| Order {
            names: self.slots.keys().copied().collect(),
            slots: self.slots.values().copied().collect(),
        });
        let rows: Vec<(&Row, u32)> = order
            .slots
            .iter()
            .filter_map(|slot| Some((self.loads.row(*slot)?, *leading.get(*slot as usize)?)))
            .collect();
        let mut words = Vec::with_capacity(7 * rows.len());
        let whole = |number: i64| number.to_ne_bytes();
        // Column by column: one loop over all of them takes twice as long.
        words.extend(rows.iter().map(|(row, leading)| whole(word(row.blocks + added - u128::from(*leading)))));
        words.extend(rows.iter().map(|(row, _)| whole(row.prefill_tokens)));
        words.extend(rows.iter().map(|(row, _)| whole(row.requests)));
        words.extend(rows.iter().map(|(_, leading)| whole(i64::from(*leading))));
        words.extend(rows.iter().map(|(row, _)| whole(row.head_prefill_tokens)));
        words.extend(rows.iter().map(|(row, _)| whole(row.prefill_requests)));
        words.extend(rows.iter().map(|(row, _)| row.head_prefill_since.to_ne_bytes()));
        Columns { ranks: Arc::clone(&order.names), words }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Key {
        (name.to_owned(), 0, 1)
    }

    fn request<'a>(name: &str, rank: Name, tokens: u64, blocks: Blocks<'a>) -> Request<'a> {
        let key = key(name);
        Request { key, rank: Some(rank), prompt_tokens: tokens, prefill_tokens: tokens, blocks, sequences: 1, now: 0.0 }
    }

    /// The load of the only rank.
    fn words(sequences: &mut Sequences, hashes: &[u64]) -> [i64; 7] {
        let words: Vec<i64> = sequences.loads(hashes, 0).words.into_iter().map(i64::from_ne_bytes).collect();
        words.try_into().unwrap()
    }

    fn is_live(booked: Booked) -> bool {
        matches!(booked, Booked::Yes(_))
    }

    #[test]
    fn the_widest_numbers_fit() {
        let mut sequences = Sequences::new(1, 10, 10);
        sequences.add_rank((1, 0));
        for name in ["a", "b", "c"] {
            assert!(is_live(sequences.book(request(name, (1, 0), u64::MAX, Blocks::Unique))));
            assert!(sequences.output_tokens(&key(name), u64::MAX));
        }
        assert_eq!(words(&mut sequences, &[])[..2], [i64::MAX, i64::MAX]);
        for name in ["a", "b", "c"] {
            assert!(sequences.free(Arc::new(key(name)), 0.0).is_some());
        }
        assert_eq!(words(&mut sequences, &[])[..2], [0, 0]);
    }

    #[test]
    fn slots_are_used_again_without_what_was_there() {
        let mut sequences = Sequences::new(16, 10, 10);
        sequences.add_rank((1, 0));
        sequences.book(request("a", (1, 0), 48, Blocks::Shared(&[1, 2, 3])));
        assert_eq!(sequences.remove_rank((1, 0)).len(), 1);
        assert!(sequences.remove_rank((1, 0)).is_empty());
        sequences.add_rank((2, 0));
        let [active_blocks, _, _, leading_active_blocks, ..] = words(&mut sequences, &[1, 2]);
        assert_eq!((active_blocks, leading_active_blocks), (2, 0));
        assert_eq!((sequences.loads.len(), sequences.active.len()), (1, 0));
    }

    #[test]
    fn what_is_freed_takes_no_room() {
        let mut sequences = Sequences::new(1, usize::MAX, 10);
        let bytes = |sequences: &Sequences| {
            sequences.active.bytes() + sequences.bookings.capacity() * size_of::<(Arc<Key>, Live)>()
        };
        sequences.add_rank((1, 0));
        for number in 0..4000 {
            let hashes: Vec<u64> = (number * 100..number * 100 + 50).collect();
            sequences.book(request(&number.to_string(), (1, 0), 50, Blocks::Shared(&hashes)));
        }
        let full = bytes(&sequences);
        assert!(full > 4_000_000);
        for number in 1..4000 {
            assert!(sequences.free(Arc::new(key(&number.to_string())), 0.0).is_some());
        }
        // Ids of blocks are kept, 4 bytes each, until none is left.
        assert!(bytes(&sequences) < full / 4, "{} of {full}", bytes(&sequences));
        assert!(sequences.free(Arc::new(key("0")), 0.0).is_some());
        assert!(bytes(&sequences) < 5000, "{}", bytes(&sequences));
    }

    #[test]
    fn ranks_are_read_anew_only_where_they_changed() {
        let mut sequences = Sequences::new(16, 10, 10);
        for worker in [3, 1, 2] {
            sequences.add_rank((worker, 0));
        }
        let before = sequences.loads(&[], 0).ranks;
        sequences.book(request("a", (2, 0), 16, Blocks::Untracked));
        let columns = sequences.loads(&[], 0);
        assert!(Arc::ptr_eq(&before, &columns.ranks));
        let requests: Vec<i64> = columns.words[6..9].iter().copied().map(i64::from_ne_bytes).collect();
        assert_eq!((&*columns.ranks, requests), ([(1, 0), (2, 0), (3, 0)].as_slice(), vec![0, 1, 0]));
        sequences.remove_rank((1, 0));
        assert_eq!(&*sequences.loads(&[], 0).ranks, &[(2, 0), (3, 0)]);
    }
}
