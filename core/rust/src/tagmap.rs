//! A hash table of references, 5 to 11 bytes each: a byte of the key's hash beside a 32-bit reference to the key.
//!
//! Keys stay where they are referred to, so a lookup names the references that may be right and its caller looks. Equal
//! keys may be there several times. Twelve references and their tags share a cache line; a line that is full passes
//! references on to the next one and counts them, so that a lookup knows where to stop and a removal leaves no mark.
//!
//! Lines are in segments of 20 KiB, found through a directory by the hash's low bits (extendible hashing): growth splits
//! one segment at a time and moves at most 3,828 references, however large the table is. Segments that run empty merge.
//! How full a segment is shows in how many references lie off their home lines, so that the usual insertion and removal
//! touch one cache line, and no counter.
//! The directory holds addresses, so that a lookup takes two dependent loads: the directory's and the line's.

use std::ptr::NonNull;

use crate::memory::{Mapping, prefetch};

const LANES: usize = 12;
/// Lines of a segment; with its header, five pages.
const LINES: usize = 319;
/// References off their home lines before a segment splits: between these, by its number, so that segments which fill
/// alike do not all split at once. With lines filled at random, that is when 3,000 to 3,300 of 3,828 lanes are taken.
const DISPLACED: std::ops::Range<u32> = 50..130;
const MERGE_BELOW: u32 = 400;
const MERGED_AT_MOST: u32 = 1600;
/// One in so many removals that leave a line empty looks whether the segment can merge.
const MERGE_LOOK: u64 = 32;
/// A directory of 2^22 segments: room for over 6 billion references. Only keys that are equal lead beyond it.
const MAX_DEPTH: u32 = 22;
const SEGMENT_BYTES: usize = (LINES + 1) * 64;

#[repr(C, align(64))]
struct Line {
    /// Byte of the hash for each lane, 0 where the lane is free; then one byte: references passed on, 255 for "many".
    tags: [u8; 16],
    references: [u32; LANES],
}

const PASSED: usize = 12;

impl Line {
    /// Which lanes have this tag, as bits.
    #[inline]
    fn with_tag(&self, tag: u8) -> u32 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of x86_64, and the tags are 16 bytes, aligned as their line is.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_load_si128, _mm_movemask_epi8, _mm_set1_epi8};
            let tags = _mm_load_si128(self.tags.as_ptr().cast::<__m128i>());
            (_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8(tag as i8))) as u32) & ((1 << LANES) - 1)
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.tags.iter().take(LANES).enumerate().fold(0, |lanes, (lane, &at)| lanes | u32::from(at == tag) << lane)
    }

    #[inline]
    fn passed(&self) -> u8 {
        let [.., passed, _, _, _] = self.tags;
        passed
    }

    #[inline]
    fn pass(&mut self, change: i8) {
        if let Some(passed) = self.tags.get_mut(PASSED) {
            // 255 is a floor that is never left: a count that was lost cannot be lowered.
            *passed = if *passed == u8::MAX { u8::MAX } else { passed.saturating_add_signed(change) };
        }
    }

    #[inline]
    fn put(&mut self, lane: usize, tag: u8, reference: u32) {
        if let (Some(at), Some(to)) = (self.tags.get_mut(lane), self.references.get_mut(lane)) {
            *at = tag;
            *to = reference;
        }
    }

    #[inline]
    fn reference(&self, lane: u32) -> u32 {
        self.references.get(lane as usize).copied().unwrap_or(u32::MAX)
    }
}

/// A segment, at the start of its mapping.
#[repr(C, align(64))]
struct Segment {
    /// References off their home lines.
    displaced: u32,
    depth: u32,
    /// The low bits of the hashes that belong here.
    bits: u32,
    /// Its number among the mappings.
    number: u32,
    spare: [u64; 6],
    lines: [Line; LINES],
}

const _: () = assert!(size_of::<Segment>() == SEGMENT_BYTES);

impl Segment {
    /// References in the segment.
    fn count(&self) -> u32 {
        self.lines.iter().map(|line| LANES as u32 - line.with_tag(0).count_ones()).sum()
    }

    /// Puts a reference into the first line with room from its home on.
    fn put(&mut self, hash: u64, reference: u32) -> bool {
        let mut at = home(hash);
        for step in 0..LINES {
            let Some(line) = self.lines.get_mut(at) else { return false };
            let free = line.with_tag(0);
            if free != 0 {
                line.put(free.trailing_zeros() as usize, tag(hash), reference);
                self.displaced += u32::from(step > 0);
                return true;
            }
            line.pass(1);
            at = next(at);
        }
        false
    }

    fn take_all(&mut self, into: &mut Vec<u32>) {
        for line in &mut self.lines {
            for (tag, reference) in line.tags.iter().zip(line.references) {
                if *tag != 0 {
                    into.push(reference);
                }
            }
            line.tags = [0; 16];
        }
        self.displaced = 0;
    }
}

#[inline]
fn home(hash: u64) -> usize {
    (((hash >> 32) * LINES as u64) >> 32) as usize
}

#[inline]
fn next(line: usize) -> usize {
    if line + 1 == LINES { 0 } else { line + 1 }
}

#[inline]
fn tag(hash: u64) -> u8 {
    ((hash >> 24) as u8).max(1)
}

/// The table. `resolve` arguments give the hash of what a reference refers to.
pub struct TagMap {
    /// Where the segment for each value of the hash's low bits is: the start of one of `mappings`.
    directory: Vec<NonNull<Segment>>,
    mappings: Vec<Option<Mapping>>,
    free: Vec<u32>,
    depth: u32,
    count: usize,
    moving: Vec<u32>,
    most_moved: usize,
}

// SAFETY: the directory's addresses are those of mappings that the table owns.
unsafe impl Send for TagMap {}
// SAFETY: shared references only read.
unsafe impl Sync for TagMap {}

impl TagMap {
    pub fn new() -> Self {
        Self {
            directory: Vec::new(),
            mappings: Vec::new(),
            free: Vec::new(),
            depth: 0,
            count: 0,
            moving: Vec::new(),
            most_moved: 0,
        }
    }

    /// References in the table.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Bytes in memory.
    pub fn bytes(&self) -> usize {
        (self.mappings.len() - self.free.len()) * SEGMENT_BYTES
            + self.directory.capacity() * 8
            + self.mappings.capacity() * size_of::<Option<Mapping>>()
            + self.moving.capacity() * 4
    }

    /// The most references and directory entries that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.most_moved
    }

    #[inline]
    fn address(&self, hash: u64) -> Option<NonNull<Segment>> {
        let at = hash & ((1u64 << self.depth) - 1);
        self.directory.get(at as usize).copied()
    }

    #[inline]
    fn segment(&self, hash: u64) -> Option<&Segment> {
        // SAFETY: the directory holds addresses of live mappings only, each SEGMENT_BYTES of zeroes or of a segment, and the
        // reference lives no longer than the borrow of the table.
        self.address(hash).map(|segment| unsafe { segment.as_ref() })
    }

    #[inline]
    fn segment_mut(&mut self, hash: u64) -> Option<&mut Segment> {
        // SAFETY: as in `segment`, with the table borrowed exclusively.
        self.address(hash).map(|mut segment| unsafe { segment.as_mut() })
    }

    /// A new, empty segment.
    fn add_segment(&mut self, depth: u32, bits: u32) -> Option<NonNull<Segment>> {
        let mapping = Mapping::zeroed(SEGMENT_BYTES)?;
        let mut address = mapping.start().cast::<Segment>();
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                self.mappings.push(None);
                self.mappings.len() as u32 - 1
            }
        };
        // SAFETY: the mapping is as large as a segment, page-aligned, and nothing else refers to it yet; zeroes are a segment.
        let segment = unsafe { address.as_mut() };
        (segment.depth, segment.bits, segment.number) = (depth, bits, number);
        *self.mappings.get_mut(number as usize)? = Some(mapping);
        Some(address)
    }

    /// Asks for the cache line that a hash leads to.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        if let Some(segment) = self.address(hash) {
            prefetch(segment.as_ptr().cast::<Line>().wrapping_add(1 + home(hash)));
        }
    }

    /// The first reference under a hash that `is_it` accepts; it may be asked about references of other hashes.
    #[inline]
    pub fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let segment = self.segment(hash)?;
        let mut at = home(hash);
        for _ in 0..LINES {
            let line = segment.lines.get(at)?;
            let mut lanes = line.with_tag(tag(hash));
            while lanes != 0 {
                let reference = line.reference(lanes.trailing_zeros());
                if is_it(reference) {
                    return Some(reference);
                }
                lanes &= lanes - 1;
            }
            if line.passed() == 0 {
                return None;
            }
            at = next(at);
        }
        None
    }

    /// Inserts if nothing of this hash can be there, and no line on the way has its tag. Does nothing where the segment
    /// may have to split.
    #[inline]
    pub fn insert_alone(&mut self, hash: u64, reference: u32) -> bool {
        let Some(segment) = self.segment_mut(hash) else { return false };
        let Some(line) = segment.lines.get_mut(home(hash)) else { return false };
        let free = line.with_tag(0);
        if free == 0 || line.with_tag(tag(hash)) != 0 {
            return false;
        }
        if line.passed() != 0 {
            // What was passed on may be of this hash. It is a line or two away.
            let mut at = next(home(hash));
            loop {
                let Some(line) = segment.lines.get(at) else { return false };
                if line.with_tag(tag(hash)) != 0 || at == home(hash) {
                    return false;
                }
                if line.passed() == 0 {
                    break;
                }
                at = next(at);
            }
        }
        if let Some(line) = segment.lines.get_mut(home(hash)) {
            line.put(free.trailing_zeros() as usize, tag(hash), reference);
        }
        self.count += 1;
        true
    }

    /// Inserts; false if there is no memory.
    pub fn insert(&mut self, hash: u64, reference: u32, resolve: impl Fn(u32) -> u64) -> bool {
        if self.directory.is_empty() {
            let Some(segment) = self.add_segment(0, 0) else { return false };
            self.directory.push(segment);
        }
        loop {
            let Some(segment) = self.segment_mut(hash) else { return false };
            let limit = DISPLACED.start + segment.number % 1024 * 37 % (DISPLACED.end - DISPLACED.start);
            if (segment.displaced < limit || segment.depth >= MAX_DEPTH) && segment.put(hash, reference) {
                self.count += 1;
                return true;
            }
            if !self.split(hash, &resolve) {
                return false;
            }
        }
    }

    /// Splits the segment that a hash leads to.
    fn split(&mut self, hash: u64, resolve: &impl Fn(u32) -> u64) -> bool {
        let Some(segment) = self.segment_mut(hash) else { return false };
        if segment.depth >= MAX_DEPTH {
            return false;
        }
        let (depth, bits) = (segment.depth, segment.bits);
        let Some(sibling) = self.add_segment(depth + 1, bits | 1 << depth) else { return false };
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        if let Some(segment) = self.segment_mut(hash) {
            segment.depth += 1;
            segment.take_all(&mut moving);
        }
        let mut moved = moving.len();
        if depth == self.depth {
            moved = moved.max(self.directory.len());
            self.directory.extend_from_within(..);
            self.depth += 1;
        }
        for entry in self.directory.iter_mut().skip((bits | 1 << depth) as usize).step_by(2 << depth) {
            *entry = sibling;
        }
        self.put_all(&moving, resolve);
        self.moving = moving;
        self.most_moved = self.most_moved.max(moved);
        true
    }

    /// Puts references where they belong.
    fn put_all(&mut self, moving: &[u32], resolve: &impl Fn(u32) -> u64) {
        let mut hashes = [0u64; 32];
        for some in moving.chunks(hashes.len()) {
            // A loop of its own, so that the keys' cache misses overlap.
            for (hash, &reference) in hashes.iter_mut().zip(some) {
                *hash = resolve(reference);
            }
            for (&hash, &reference) in hashes.iter().zip(some) {
                if let Some(segment) = self.segment_mut(hash) {
                    segment.put(hash, reference);
                }
            }
        }
    }

    /// Removes a reference; false if it is not there.
    pub fn remove(&mut self, hash: u64, reference: u32, resolve: impl Fn(u32) -> u64) -> bool {
        let Some(segment) = self.segment_mut(hash) else { return false };
        let start = home(hash);
        let mut line_at = start;
        let mut found = false;
        let mut empty = false;
        for _ in 0..LINES {
            let Some(line) = segment.lines.get_mut(line_at) else { return false };
            let mut lanes = line.with_tag(tag(hash));
            while lanes != 0 {
                if line.reference(lanes.trailing_zeros()) == reference {
                    // Looked at first: to read a line just after a byte of it was written stalls.
                    empty = line.with_tag(0) | 1 << lanes.trailing_zeros() == (1 << LANES) - 1;
                    line.put(lanes.trailing_zeros() as usize, 0, 0);
                    found = true;
                    break;
                }
                lanes &= lanes - 1;
            }
            if found || line.passed() == 0 {
                break;
            }
            line_at = next(line_at);
        }
        if !found {
            return false;
        }
        let mut passed = start;
        while passed != line_at {
            if let Some(line) = segment.lines.get_mut(passed) {
                line.pass(-1);
            }
            passed = next(passed);
        }
        segment.displaced -= u32::from(line_at != start);
        let look = empty && segment.depth > 0;
        self.count -= 1;
        if look && (self.count as u64).is_multiple_of(MERGE_LOOK) {
            self.merge(hash, &resolve);
        }
        true
    }

    /// Joins the segment that a hash leads to with the one it was split from, if both are nearly empty.
    fn merge(&mut self, hash: u64, resolve: &impl Fn(u32) -> u64) {
        let Some(segment) = self.segment(hash) else { return };
        let (depth, bits, count, number) = (segment.depth, segment.bits, segment.count(), segment.number);
        if count >= MERGE_BELOW {
            return;
        }
        let buddy_bits = bits ^ 1 << (depth - 1);
        let Some(buddy) = self.address(u64::from(buddy_bits)) else { return };
        let Some(other) = self.segment(u64::from(buddy_bits)) else { return };
        if other.number == number || other.depth != depth || other.count() + count > MERGED_AT_MOST {
            return;
        }
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        if let Some(segment) = self.segment_mut(hash) {
            segment.take_all(&mut moving);
        }
        for entry in self.directory.iter_mut().skip(bits as usize).step_by(1 << depth) {
            *entry = buddy;
        }
        if let Some(gone) = self.mappings.get_mut(number as usize) {
            *gone = None;
            self.free.push(number);
        }
        if let Some(other) = self.segment_mut(hash) {
            other.depth -= 1;
            other.bits &= (1 << other.depth) - 1;
        }
        self.put_all(&moving, resolve);
        self.most_moved = self.most_moved.max(moving.len());
        self.moving = moving;
    }

    /// Forgets the directory of an empty table.
    pub fn shrink(&mut self) {
        if self.count == 0 {
            *self = Self { most_moved: self.most_moved, ..Self::new() };
        }
    }
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
            if !map.insert_alone(hash(key), key) {
                assert!(map.insert(hash(key), key, hash));
            }
        }
        assert!((2500..=4096).contains(&map.most_moved()), "{}", map.most_moved());
        assert!(map.bytes() < 13 * 1_000_000, "{}", map.bytes());
        for key in 0..1_000_000u32 {
            assert_eq!(map.find(hash(key), |found| found == key), Some(key));
        }
        assert!((1_000_000..1_001_000u32).all(|key| map.find(hash(key), |found| found == key).is_none()));
        for key in (0..1_000_000u32).filter(|key| !key.is_multiple_of(50)) {
            assert!(map.remove(hash(key), key, hash));
            assert!(!map.remove(hash(key), key, hash));
        }
        assert_eq!(map.len(), 20_000);
        assert!(map.bytes() < 2_000_000, "{}", map.bytes());
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
