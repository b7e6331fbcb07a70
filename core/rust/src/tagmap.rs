//! A hash table of references, some 11 bytes each: 16 bits of the key's hash beside a 32-bit reference to the key.
//!
//! Keys stay where they are referred to, so a lookup names the references that may be right and its caller looks. Equal
//! keys may be there several times. Ten references and their tags share a cache line; a line that is full passes
//! references on to the next one and counts them, so that a lookup knows where to stop and a removal leaves no mark.
//!
//! Lines are in segments of 16 KiB, and the table grows by one segment at a time (spiral storage). Of `s` segments, the
//! buckets `s..2s` are in use. A hash has a mantissa between 1 and 2, and its bucket is the mantissa times the power of
//! two that leads there. To grow is to part bucket `s` between the buckets `2s` and `2s + 1`, to shrink the reverse.
//! Mantissas are spread so that bucket `b` has a load in proportion to 1/b: the bucket to be parted is always the fullest,
//! so that the table is as full at every size, and no two moments of its growth differ. A bucket's segment is found by
//! arithmetic alone: `2s` takes over the segment of `s`, and `2s + 1` the new one.

use std::ptr::NonNull;

use crate::memory::{HUGE_PAGE, Mapping, prefetch};

const LANES: usize = 10;
/// Lines of a segment.
const LINES: usize = 256;
const SEGMENT_BYTES: usize = LINES * 64;
/// Segments of a mapping: a huge page's.
const STRETCH: usize = HUGE_PAGE / SEGMENT_BYTES;
/// References for each segment on average, at most. The fullest segment has 1.44 times as many: 70% of its lanes. Fuller
/// lines would pass more on: a wrongly predicted branch each, and often a cache miss.
const MOST: usize = LINES * LANES * 48 / 100;
/// Segments go when there are less. A table that is emptied at random shrinks with its content.
const LEAST: usize = MOST * 2 / 3;
/// Segments are numbered by less than this: room for 6 billion references.
const MAX_SEGMENTS: u32 = 1 << 22;
/// How many lines, and how many keys, are asked for ahead of their turn.
const AHEAD: usize = 60;

/// What references refer to.
pub trait Keys {
    /// Hash of the key that a reference refers to.
    fn hash(&self, reference: u32) -> u64;
    /// Asks for the key's cache line.
    fn prefetch(&self, _reference: u32) {}
}

impl<F: Fn(u32) -> u64> Keys for F {
    fn hash(&self, reference: u32) -> u64 {
        self(reference)
    }
}

#[repr(C, align(64))]
struct Line {
    /// 16 bits of the hash for each lane, 0 where the lane is free.
    tags: [u16; LANES],
    /// References that would be here if there had been room.
    passed: u16,
    spare: u16,
    references: [u32; LANES],
}

const _: () = assert!(size_of::<Line>() == 64);

impl Line {
    /// Which lanes have this tag, as bits.
    #[inline]
    fn with_tag(&self, tag: u16) -> u32 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of x86_64, and a line is 64 readable bytes, aligned to as many.
        unsafe {
            use std::arch::x86_64::{
                __m128i, _mm_cmpeq_epi16, _mm_load_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16,
            };
            let wanted = _mm_set1_epi16(tag as i16);
            let words = std::ptr::from_ref(self).cast::<__m128i>();
            let (first, second) = (_mm_load_si128(words), _mm_load_si128(words.add(1)));
            let equal = _mm_packs_epi16(_mm_cmpeq_epi16(first, wanted), _mm_cmpeq_epi16(second, wanted));
            _mm_movemask_epi8(equal) as u32 & ((1 << LANES) - 1)
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.tags.iter().enumerate().fold(0, |lanes, (lane, &at)| lanes | u32::from(at == tag) << lane)
    }

    #[inline]
    fn put(&mut self, lane: u32, tag: u16, reference: u32) {
        if let (Some(at), Some(to)) = (self.tags.get_mut(lane as usize), self.references.get_mut(lane as usize)) {
            *at = tag;
            *to = reference;
        }
    }

    #[inline]
    fn reference(&self, lane: u32) -> u32 {
        self.references.get(lane as usize).copied().unwrap_or(u32::MAX)
    }
}

#[inline]
fn tag(hash: u64) -> u16 {
    (hash as u16).max(1)
}

/// The line after one, in the same segment.
#[inline]
fn next(line: u32) -> u32 {
    const IN_SEGMENT: u32 = LINES as u32 - 1;
    line & !IN_SEGMENT | (line + 1) & IN_SEGMENT
}

/// The table.
pub struct TagMap {
    stretches: Vec<Mapping>,
    segments: u32,
    /// Shifts a mantissa, 32 bits after the point, to a bucket in the upper half of the power of two below 2 * segments.
    shift: u32,
    count: usize,
    moving: Vec<u32>,
    most_moved: usize,
}

impl TagMap {
    pub fn new() -> Self {
        Self { stretches: Vec::new(), segments: 0, shift: 32, count: 0, moving: Vec::new(), most_moved: 0 }
    }

    /// References in the table.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        self.segments as usize * SEGMENT_BYTES
            + self.stretches.capacity() * size_of::<Mapping>()
            + self.moving.capacity() * 4
    }

    /// The most references that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.most_moved
    }

    /// The number of the line that is a hash's home.
    #[inline]
    fn home(&self, hash: u64) -> u32 {
        // 2^x - 1 is x * (0.6565 + 0.3435 * x) to 0.3%: near enough for even loads.
        const STEEP: u64 = 1_475_331_850; // 0.3435 * 2^32
        const FLAT: u64 = (1 << 32) - STEEP;
        let x = hash >> 32;
        let mantissa = (1 << 32) + ((x * (FLAT + ((x * STEEP) >> 32))) >> 32);
        let below = mantissa >> self.shift;
        let bucket = if below < u64::from(self.segments) { mantissa >> (self.shift - 1) } else { below };
        segment_of(bucket as u32) * LINES as u32 + ((hash >> 24) as u32 & (LINES as u32 - 1))
    }

    #[inline]
    fn address(&self, line: u32) -> Option<NonNull<Line>> {
        const LINES_OF_STRETCH: u32 = (STRETCH * LINES) as u32;
        let stretch = self.stretches.get((line / LINES_OF_STRETCH) as usize)?;
        // SAFETY: a stretch has LINES_OF_STRETCH lines, so the address lies inside its mapping.
        Some(unsafe { stretch.start().cast::<Line>().add((line % LINES_OF_STRETCH) as usize) })
    }

    #[inline]
    fn line(&self, line: u32) -> Option<&Line> {
        // SAFETY: the line is in a live mapping and aligned, any bytes are a line, and `self` is borrowed as long.
        self.address(line).map(|line| unsafe { line.as_ref() })
    }

    #[inline]
    fn line_mut(&mut self, line: u32) -> Option<&mut Line> {
        // SAFETY: as in `line`, with `self` borrowed exclusively.
        self.address(line).map(|mut line| unsafe { line.as_mut() })
    }

    /// Asks for the cache line that a hash leads to.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        self.prefetch_line(self.home(hash));
    }

    #[inline]
    fn prefetch_line(&self, line: u32) {
        if let Some(line) = self.address(line) {
            prefetch(line.as_ptr());
        }
    }

    /// The first reference under a hash that `is_it` accepts; it may be asked about references of other hashes.
    #[inline]
    pub fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut at = self.home(hash);
        for _ in 0..LINES {
            let line = self.line(at)?;
            let mut lanes = line.with_tag(tag(hash));
            while lanes != 0 {
                let reference = line.reference(lanes.trailing_zeros());
                if is_it(reference) {
                    return Some(reference);
                }
                lanes &= lanes - 1;
            }
            if line.passed == 0 {
                return None;
            }
            at = next(at);
        }
        None
    }

    /// Inserts references in order, and stops before the first one beside which another of the same hash may be. Returns
    /// how many it inserted. `grow` must have been called for them.
    pub fn insert_alone(&mut self, references: &[(u64, u32)]) -> usize {
        let mut homes = Homes::new();
        for (at, &(hash, reference)) in references.iter().enumerate() {
            let home = homes.at(self, at, references);
            if self.may_have(home, tag(hash)) || !self.put_at(home, tag(hash), reference) {
                self.count += at;
                return at;
            }
        }
        self.count += references.len();
        references.len()
    }

    /// How many of the hashes, in order, surely have no reference here.
    pub fn absent(&self, hashes: &[(u64, u32)]) -> usize {
        let mut homes = Homes::new();
        hashes
            .iter()
            .enumerate()
            .take_while(|(at, (hash, _))| !self.may_have(homes.at(self, *at, hashes), tag(*hash)))
            .count()
    }

    /// Removes references, those that are there. `shrink_to_fit` should follow.
    pub fn remove_all(&mut self, references: &[(u64, u32)]) {
        let mut homes = Homes::new();
        for (at, &(hash, reference)) in references.iter().enumerate() {
            let home = homes.at(self, at, references);
            self.count -= usize::from(self.remove_at(home, tag(hash), reference));
        }
    }

    /// Whether a tag is in a line, or may be among what the line passed on.
    #[inline]
    fn may_have(&self, home: u32, tag: u16) -> bool {
        let mut at = home;
        for _ in 0..LINES {
            let Some(line) = self.line(at) else { return false };
            if line.with_tag(tag) != 0 {
                return true;
            }
            if line.passed == 0 {
                return false;
            }
            at = next(at);
        }
        true
    }

    /// Inserts; false if there is no memory, or if thousands of equal keys are there.
    pub fn insert(&mut self, hash: u64, reference: u32, keys: impl Keys) -> bool {
        if !self.grow(1, &keys) || !self.put_at(self.home(hash), tag(hash), reference) {
            return false;
        }
        self.count += 1;
        true
    }

    /// Puts a reference into the first line with room from its home on.
    #[inline]
    fn put_at(&mut self, home: u32, tag: u16, reference: u32) -> bool {
        let mut at = home;
        for _ in 0..LINES {
            let Some(line) = self.line_mut(at) else { return false };
            let free = line.with_tag(0);
            if free != 0 {
                line.put(free.trailing_zeros(), tag, reference);
                return true;
            }
            line.passed += 1;
            at = next(at);
        }
        // No line has room, and each was told of one more that passed.
        self.unpass(home, home);
        false
    }

    /// Takes back that a reference was passed on from its home up to a line; if they are one, all around.
    fn unpass(&mut self, home: u32, to: u32) {
        let mut at = home;
        loop {
            let Some(line) = self.line_mut(at) else { return };
            line.passed -= 1;
            at = next(at);
            if at == to {
                return;
            }
        }
    }

    /// Removes a reference; false if it is not there.
    pub fn remove(&mut self, hash: u64, reference: u32, keys: impl Keys) -> bool {
        let removed = self.remove_at(self.home(hash), tag(hash), reference);
        self.count -= usize::from(removed);
        self.shrink_to_fit(&keys);
        removed
    }

    #[inline]
    fn remove_at(&mut self, home: u32, tag: u16, reference: u32) -> bool {
        let mut at = home;
        for _ in 0..LINES {
            let Some(line) = self.line_mut(at) else { return false };
            let mut lanes = line.with_tag(tag);
            while lanes != 0 {
                if line.reference(lanes.trailing_zeros()) == reference {
                    line.put(lanes.trailing_zeros(), 0, 0);
                    if at != home {
                        self.unpass(home, at);
                    }
                    return true;
                }
                lanes &= lanes - 1;
            }
            if line.passed == 0 {
                return false;
            }
            at = next(at);
        }
        false
    }

    /// Makes room for so many more references; false if there is no memory.
    #[inline]
    pub fn grow(&mut self, more: usize, keys: &impl Keys) -> bool {
        while self.count + more > self.segments as usize * MOST {
            if !self.add_segment(keys) {
                return false;
            }
        }
        true
    }

    /// Gives up segments that the references left do not need.
    #[inline]
    pub fn shrink_to_fit(&mut self, keys: &impl Keys) {
        while self.segments > 1 && self.count < (self.segments - 1) as usize * LEAST {
            self.drop_segment(keys);
        }
    }

    /// Parts the fullest bucket.
    fn add_segment(&mut self, keys: &impl Keys) -> bool {
        let parted = self.segments;
        if parted >= MAX_SEGMENTS {
            return false;
        }
        if parted as usize >= self.stretches.len() * STRETCH {
            let Some(stretch) = Mapping::zeroed(HUGE_PAGE) else { return false };
            if parted > 0 {
                stretch.prefer_huge_pages();
            }
            self.stretches.push(stretch);
        }
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        if parted > 0 {
            self.take_all(segment_of(parted), &mut moving);
        }
        self.resize(parted + 1);
        self.put_all(&moving, keys);
        self.moving = moving;
        true
    }

    /// Joins the last two buckets.
    fn drop_segment(&mut self, keys: &impl Keys) {
        let left = self.segments - 1;
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        self.take_all(segment_of(2 * left), &mut moving);
        self.take_all(left, &mut moving);
        self.resize(left);
        self.put_all(&moving, keys);
        self.moving = moving;
        let used = left as usize % STRETCH;
        if used == 0 {
            self.stretches.pop();
        } else if let Some(last) = self.stretches.last_mut() {
            last.give_back(used * SEGMENT_BYTES, SEGMENT_BYTES);
        }
    }

    fn resize(&mut self, segments: u32) {
        self.segments = segments;
        self.shift = 32 - segments.ilog2();
    }

    /// Empties a segment.
    fn take_all(&mut self, segment: u32, into: &mut Vec<u32>) {
        let first = segment * LINES as u32;
        for line in first..first + LINES as u32 {
            let Some(line) = self.line_mut(line) else { return };
            into.extend(line.tags.iter().zip(line.references).filter(|(tag, _)| **tag != 0).map(|(_, to)| to));
            line.tags = [0; LANES];
            line.passed = 0;
        }
    }

    /// Puts references where they belong.
    fn put_all(&mut self, moving: &[u32], keys: &impl Keys) {
        for reference in moving.iter().take(AHEAD) {
            keys.prefetch(*reference);
        }
        for (at, &reference) in moving.iter().enumerate() {
            if let Some(ahead) = moving.get(at + AHEAD) {
                keys.prefetch(*ahead);
            }
            let hash = keys.hash(reference);
            if !self.put_at(self.home(hash), tag(hash), reference) {
                self.count -= 1;
            }
        }
        self.most_moved = self.most_moved.max(moving.len());
    }

    /// Gives all memory of an empty table back.
    pub fn shrink(&mut self) {
        if self.count == 0 {
            *self = Self { most_moved: self.most_moved, ..Self::new() };
        }
    }
}

/// The homes of many hashes, each computed once and asked for well before its turn.
struct Homes {
    ring: [u32; (AHEAD + 1).next_power_of_two()],
    asked: usize,
}

impl Homes {
    fn new() -> Self {
        Self { ring: [0; (AHEAD + 1).next_power_of_two()], asked: 0 }
    }

    /// The home of the hash at a position. Positions must come in order.
    #[inline]
    fn at(&mut self, map: &TagMap, at: usize, hashes: &[(u64, u32)]) -> u32 {
        while self.asked <= at + AHEAD
            && let Some((hash, _)) = hashes.get(self.asked)
        {
            let home = map.home(*hash);
            let place = self.asked % self.ring.len();
            if let Some(place) = self.ring.get_mut(place) {
                *place = home;
            }
            map.prefetch_line(home);
            self.asked += 1;
        }
        self.ring.get(at % self.ring.len()).copied().unwrap_or_default()
    }
}

/// Where a bucket is: a bucket of an even number is where its half was.
#[inline]
fn segment_of(bucket: u32) -> u32 {
    bucket >> (bucket.trailing_zeros() + 1)
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::Secret;

    #[test]
    fn grows_without_stalls_and_shrinks() {
        let secret = Secret::random();
        let hash = |key: u32| secret.mix(u64::from(key));
        let mut map = TagMap::new();
        for key in 0..1_000_000u32 {
            assert!(map.grow(1, &hash));
            if map.insert_alone(&[(hash(key), key)]) == 0 {
                assert!(map.insert(hash(key), key, hash));
            }
            if key >= 100_000 && key.is_multiple_of(1000) {
                assert!(map.bytes() < 15 * key as usize, "{} for {key}", map.bytes());
            }
        }
        assert!((1500..=2560).contains(&map.most_moved()), "{}", map.most_moved());
        for key in 0..1_000_000u32 {
            assert_eq!(map.find(hash(key), |found| found == key), Some(key));
        }
        assert!((1_000_000..1_001_000u32).all(|key| map.find(hash(key), |found| found == key).is_none()));
        for key in (0..1_000_000u32).filter(|key| !key.is_multiple_of(50)) {
            assert!(map.remove(hash(key), key, hash));
            assert!(!map.remove(hash(key), key, hash));
        }
        assert_eq!(map.len(), 20_000);
        assert!(map.bytes() < 500_000, "{}", map.bytes());
        for key in 0..1_000_000u32 {
            assert_eq!(map.find(hash(key), |found| found == key).is_some(), key.is_multiple_of(50));
        }
        assert!(map.most_moved() <= 4096);
    }

    #[test]
    fn equal_keys_are_all_found() {
        let mut map = TagMap::new();
        for reference in 0..300u32 {
            assert!(map.insert(7 << 40, reference, |_| 7 << 40));
        }
        let mut seen = 0;
        assert_eq!(
            map.find(7 << 40, |_| {
                seen += 1;
                false
            }),
            None
        );
        assert_eq!(seen, 300);
        assert!((0..300).rev().all(|reference| map.remove(7 << 40, reference, |_| 7 << 40)));
        assert_eq!(map.len(), 0);
    }
}
