//! How recently the cached blocks of each rank were used, and how often idle blocks are used again.

use std::collections::HashMap;

use crate::index::tree::ranks::Name;
use crate::load::recent_blocks::RecentBlocks;

/// Number of bins of idle times, of half an octave each.
const BINS: usize = 64;
/// End of the first bin.
const FIRST_BIN_SECONDS: f64 = 1e-3;
/// Time for which the count of idle blocks is reused.
const COUNT_SECONDS: f64 = 5.0;
/// Time for which the chance of a rank is reused.
const REFRESH_SECONDS: f64 = 1.0;
/// Number of ranks whose chance one call renews at most: a rank takes some microseconds.
const REFRESHED_AT_ONCE: usize = 16;
/// Blocks covered by the history, as a multiple of those of all caches.
const HISTORY_CACHES: u64 = 4;

/// A rank with the incarnation and the number of blocks of its cache.
pub type CachedRank = (Name, u64, u64);

struct Cache {
    incarnation: u64,
    used: RecentBlocks,
    refreshed_at: f64,
}

/// Implements `kvrouter.core.interface.CacheRecency`.
pub struct Recency {
    rank_sample: u64,
    max_sample: u64,
    now: f64,
    caches: Vec<Cache>,
    places: HashMap<Name, usize>,
    /// Trailing zero bits of the hashes in the samples.
    shift: u32,
    history_shift: u32,
    history: RecentBlocks,
    /// Uses of blocks by the time for which they were idle before.
    reused: [f64; BINS],
    /// Blocks that left the history, by the time for which they had been idle.
    forgotten: [f64; BINS],
    forgotten_since_halving: usize,
    /// Blocks of the history by the time for which they have been idle, at `counted_at`.
    idle: [f64; BINS],
    counted_at: f64,
    /// Place of the rank whose chance is renewed next.
    next_refreshed: usize,
    chance: Vec<f64>,
}

impl Recency {
    /// Requires samples of 1 block or more.
    pub fn new(rank_sample: u64, max_sample: u64, history_sample: usize) -> Self {
        Self {
            rank_sample,
            max_sample,
            now: f64::NEG_INFINITY,
            caches: Vec::new(),
            places: HashMap::new(),
            shift: 0,
            history_shift: 0,
            history: RecentBlocks::new(history_sample),
            reused: [0.0; BINS],
            forgotten: [0.0; BINS],
            forgotten_since_halving: 0,
            idle: [0.0; BINS],
            counted_at: f64::NEG_INFINITY,
            next_refreshed: 0,
            chance: Vec::new(),
        }
    }

    /// Returns the number of sampled blocks.
    pub fn len(&self) -> usize {
        self.caches.iter().map(|cache| cache.used.len()).sum::<usize>() + self.history.len()
    }

    pub fn set_ranks(&mut self, ranks: &[CachedRank]) {
        let mut before: HashMap<Name, Cache> = HashMap::new();
        let mut caches: Vec<Option<Cache>> = self.caches.drain(..).map(Some).collect();
        for (name, place) in self.places.drain() {
            if let Some(cache) = caches.get_mut(place).and_then(Option::take) {
                before.insert(name, cache);
            }
        }
        let total: u64 = ranks.iter().map(|(_, _, blocks)| *blocks).fold(0, u64::saturating_add);
        let known = ranks.iter().filter(|(_, _, blocks)| *blocks > 0).count() as u64;
        let most = self.rank_sample.saturating_mul(known).min(self.max_sample);
        while total >> self.shift > most {
            self.shift += 1;
        }
        while total.saturating_mul(HISTORY_CACHES) >> self.history_shift > self.history.most() as u64 {
            self.history_shift += 1;
        }
        for (place, &(name, incarnation, total_blocks)) in ranks.iter().enumerate() {
            let most = sampled(total_blocks, self.shift);
            let known = before.remove(&name).filter(|cache| cache.incarnation == incarnation);
            let mut used = known.map_or_else(|| RecentBlocks::new(most), |cache| cache.used);
            used.limit(most, |block| is_sampled(block, self.shift));
            self.places.insert(name, place);
            self.caches.push(Cache { incarnation, used, refreshed_at: f64::NEG_INFINITY });
        }
        let (most, shift) = (self.history.most(), self.history_shift);
        self.history.limit(most, |block| is_sampled(block, shift));
        self.chance = vec![0.0; self.caches.len()];
        self.next_refreshed = 0;
    }

    pub fn record(&mut self, rank: Name, blocks: &[u64], now: f64) {
        self.pass(now);
        let place = self.places.get(&rank).copied();
        // The history samples no more blocks than a rank, or the other way around.
        let coarse = self.shift.min(self.history_shift);
        for block in blocks.iter().rev().copied().filter(|block| is_sampled(*block, coarse)) {
            if let Some(cache) = place.and_then(|place| self.caches.get_mut(place))
                && is_sampled(block, self.shift)
            {
                cache.used.touch(block, self.now);
            }
            if is_sampled(block, self.history_shift) {
                self.note_use(block);
            }
        }
    }

    /// Returns the chance of reuse of each rank.
    pub fn reuse_chance(&mut self, now: f64) -> &[f64] {
        self.pass(now);
        if self.now >= self.counted_at + COUNT_SECONDS {
            self.counted_at = self.now;
            self.idle = [0.0; BINS];
            let now = self.now;
            for at in self.history.oldest_first() {
                add(&mut self.idle, now - at);
            }
        }
        self.refresh();
        &self.chance
    }

    /// Advances the clock, which never goes backwards.
    fn pass(&mut self, now: f64) {
        if now > self.now {
            self.now = now;
        }
    }

    /// Renews the chance of ranks, in turns.
    fn refresh(&mut self) {
        let mut chances = None;
        for _ in 0..self.caches.len().min(REFRESHED_AT_ONCE) {
            let (place, now) = (self.next_refreshed, self.now);
            if self.caches.get(place).is_none_or(|cache| now < cache.refreshed_at + REFRESH_SECONDS) {
                break;
            }
            let chances = chances.get_or_insert_with(|| self.chances());
            if let (Some(cache), Some(to)) = (self.caches.get_mut(place), self.chance.get_mut(place)) {
                cache.refreshed_at = now;
                *to = mean_chance(&cache.used, chances, now);
            }
            self.next_refreshed = (place + 1) % self.caches.len();
        }
    }

    fn note_use(&mut self, block: u64) {
        let touched = self.history.touch(block, self.now);
        if let Some(before) = touched.before {
            add(&mut self.reused, self.now - before);
        }
        if let Some(dropped) = touched.dropped {
            add(&mut self.forgotten, self.now - dropped);
            self.forgotten_since_halving += 1;
            if self.forgotten_since_halving >= self.history.most() {
                self.forgotten_since_halving = 0;
                for count in self.reused.iter_mut().chain(&mut self.forgotten) {
                    *count /= 2.0;
                }
            }
        }
    }

    /// Returns the chance of reuse by bin of idle time, and 0 for the end.
    fn chances(&self) -> [f64; BINS + 1] {
        let mut chances = [0.0; BINS + 1];
        let (mut reused, mut unused) = (0.0, 0.0);
        let counts = self.reused.iter().zip(&self.forgotten).zip(&self.idle);
        for (chance, ((used, forgotten), idle)) in chances.iter_mut().zip(counts).rev() {
            reused += used;
            unused += forgotten + idle;
            *chance = reused / (reused + unused + 1.0);
        }
        chances
    }
}

fn is_sampled(block: u64, shift: u32) -> bool {
    block & ((1u64 << shift) - 1) == 0
}

/// Number of sampled blocks in a cache of so many blocks.
fn sampled(blocks: u64, shift: u32) -> usize {
    if blocks == 0 { 0 } else { ((blocks >> shift) as usize).max(1) }
}

/// Mean chance over a cache that a block is used again, 0 for one without content.
fn mean_chance(used: &RecentBlocks, chances: &[f64; BINS + 1], now: f64) -> f64 {
    let (mut sum, mut last, mut chance) = (0.0, f64::NAN, 0.0);
    // Blocks that were used at the same time follow each other.
    for at in used.oldest_first() {
        if at != last {
            (last, chance) = (at, interpolated(chances, now - at));
        }
        sum += chance;
    }
    sum / used.most().max(1) as f64
}

fn interpolated(chances: &[f64; BINS + 1], seconds: f64) -> f64 {
    let position = position(seconds);
    let bin = position as usize;
    match chances.get(bin..bin + 2) {
        Some([here, next]) => here + (position - bin as f64) * (next - here),
        _ => 0.0,
    }
}

/// Position of an idle time among the bins.
fn position(seconds: f64) -> f64 {
    if seconds > FIRST_BIN_SECONDS {
        (2.0 * (seconds / FIRST_BIN_SECONDS).log2()).clamp(0.0, (BINS - 1) as f64)
    } else {
        0.0
    }
}

fn add(counts: &mut [f64; BINS], seconds: f64) {
    if let Some(count) = counts.get_mut(position(seconds) as usize) {
        *count += 1.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_stay_within_their_bounds() {
        let mut recency = Recency::new(4, 16, 8);
        let ranks: Vec<CachedRank> = (0..100).map(|worker| ((worker, 0), 1, 1000)).collect();
        recency.set_ranks(&ranks);
        for number in 0..1_000_000u64 {
            recency.record((number % 100, 0), &[number.wrapping_mul(0x9e37_79b9_7f4a_7c15)], number as f64);
        }
        assert!(recency.len() <= 100 + 8, "one block at least for each rank");
        assert_eq!(recency.history.len(), 8);
        recency.set_ranks(&[]);
        assert_eq!(recency.len(), 8);
    }
}
