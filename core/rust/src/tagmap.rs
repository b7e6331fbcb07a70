//! A hash table of references, 5 to 11 bytes each: a byte of the key's hash beside a 32-bit reference to the key.
//!
//! Keys stay where they are referred to, so a lookup names the references that may be right and its caller looks. Equal
//! keys may be there several times. Twelve references and their tags share a cache line; a line that is full passes
//! references on to the next one and counts them, so that a lookup knows where to stop and a removal leaves no mark.
//!
//! Lines are in segments of 24 KiB, found through a directory by the hash's low bits (extendible hashing): growth splits
//! one segment at a time and moves at most 3,900 references, however large the table is. Segments that run empty merge.

use crate::memory::{Mapping, prefetch};

const LANES: usize = 12;
const LINES: usize = 384;
/// References in a segment before it splits: 85% of the room.
const FULL: u32 = 3900;
const MERGE_BELOW: u32 = 500;
const MERGED_AT_MOST: u32 = 1900;
/// A directory of 2^22 segments: room for over 8 billion references. Only keys that are equal lead beyond it.
const MAX_DEPTH: u32 = 22;
const SEGMENT_BYTES: usize = LINES * 64;

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

struct Segment {
    memory: Mapping,
    count: u32,
    depth: u32,
    /// The low bits of the hashes that belong here.
    bits: u32,
}

impl Segment {
    fn new(depth: u32, bits: u32) -> Option<Self> {
        Some(Self { memory: Mapping::zeroed(SEGMENT_BYTES)?, count: 0, depth, bits })
    }

    #[inline]
    fn lines(&self) -> &[Line; LINES] {
        // SAFETY: the mapping is SEGMENT_BYTES long, page-aligned, and zeroes or lines written through `lines_mut`.
        unsafe { self.memory.start().cast().as_ref() }
    }

    #[inline]
    fn lines_mut(&mut self) -> &mut [Line; LINES] {
        // SAFETY: as in `lines`, borrowed exclusively.
        unsafe { self.memory.start().cast().as_mut() }
    }

    /// Puts a reference into the first line with room from its home on. There must be room.
    fn put(&mut self, hash: u64, reference: u32) -> bool {
        let mut at = home(hash);
        let lines = self.lines_mut();
        for _ in 0..LINES {
            let Some(line) = lines.get_mut(at) else { return false };
            let free = line.with_tag(0);
            if free != 0 {
                line.put(free.trailing_zeros() as usize, tag(hash), reference);
                self.count += 1;
                return true;
            }
            line.pass(1);
            at = next(at);
        }
        false
    }

    fn take_all(&mut self, into: &mut Vec<u32>) {
        for line in self.lines_mut() {
            for (tag, reference) in line.tags.iter().zip(line.references) {
                if *tag != 0 {
                    into.push(reference);
                }
            }
            line.tags = [0; 16];
        }
        self.count = 0;
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
    directory: Vec<u32>,
    segments: Vec<Option<Segment>>,
    free: Vec<u32>,
    depth: u32,
    count: usize,
    moving: Vec<u32>,
    most_moved: usize,
}

impl TagMap {
    pub fn new() -> Self {
        Self {
            directory: Vec::new(),
            segments: Vec::new(),
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
        (self.segments.len() - self.free.len()) * SEGMENT_BYTES
            + self.directory.capacity() * 4
            + self.segments.capacity() * size_of::<Option<Segment>>()
            + self.moving.capacity() * 4
    }

    /// The most references and directory entries that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.most_moved
    }

    #[inline]
    fn segment_of(&self, hash: u64) -> u32 {
        let at = hash & ((1u64 << self.depth) - 1);
        self.directory.get(at as usize).copied().unwrap_or(u32::MAX)
    }

    #[inline]
    fn segment(&self, hash: u64) -> Option<&Segment> {
        self.segments.get(self.segment_of(hash) as usize)?.as_ref()
    }

    /// Asks for the cache line that a hash leads to.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        if let Some(segment) = self.segment(hash) {
            prefetch(segment.memory.start().as_ptr().wrapping_add(home(hash) * 64));
        }
    }

    /// The first reference under a hash that `is_it` accepts; it may be asked about references of other hashes.
    #[inline]
    pub fn find(&self, hash: u64, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let segment = self.segment(hash)?;
        let mut at = home(hash);
        for _ in 0..LINES {
            let line = segment.lines().get(at)?;
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

    /// Inserts if nothing under this hash can be there: its line has room, has passed nothing on, and has no such tag.
    #[inline]
    pub fn insert_alone(&mut self, hash: u64, reference: u32) -> bool {
        let at = self.segment_of(hash);
        let Some(Some(segment)) = self.segments.get_mut(at as usize) else { return false };
        if segment.count >= FULL {
            return false;
        }
        let Some(line) = segment.lines_mut().get_mut(home(hash)) else { return false };
        let free = line.with_tag(0);
        if free == 0 || line.passed() != 0 || line.with_tag(tag(hash)) != 0 {
            return false;
        }
        line.put(free.trailing_zeros() as usize, tag(hash), reference);
        segment.count += 1;
        self.count += 1;
        true
    }

    /// Inserts; false if there is no memory.
    pub fn insert(&mut self, hash: u64, reference: u32, resolve: impl Fn(u32) -> u64) -> bool {
        if self.directory.is_empty() {
            let Some(segment) = Segment::new(0, 0) else { return false };
            self.segments.push(Some(segment));
            self.directory.push(0);
        }
        loop {
            let at = self.segment_of(hash);
            let Some(Some(segment)) = self.segments.get_mut(at as usize) else { return false };
            if segment.count < FULL || (segment.depth >= MAX_DEPTH && segment.count < (LINES * LANES) as u32) {
                let put = segment.put(hash, reference);
                self.count += usize::from(put);
                return put;
            }
            if !self.split(at, &resolve) {
                return false;
            }
        }
    }

    fn split(&mut self, at: u32, resolve: &impl Fn(u32) -> u64) -> bool {
        let Some(Some(segment)) = self.segments.get_mut(at as usize) else { return false };
        if segment.depth >= MAX_DEPTH {
            return false;
        }
        let (depth, bits) = (segment.depth, segment.bits);
        let Some(sibling) = Segment::new(depth + 1, bits | 1 << depth) else { return false };
        let mut moved = 0;
        if depth == self.depth {
            self.directory.extend_from_within(..);
            self.depth += 1;
            moved += self.directory.len() / 2;
        }
        segment.depth += 1;
        self.moving.clear();
        segment.take_all(&mut self.moving);
        moved = moved.max(self.moving.len());
        let new = match self.free.pop() {
            Some(new) => {
                if let Some(place) = self.segments.get_mut(new as usize) {
                    *place = Some(sibling);
                }
                new
            }
            None => {
                self.segments.push(Some(sibling));
                self.segments.len() as u32 - 1
            }
        };
        for entry in self.directory.iter_mut().skip((bits | 1 << depth) as usize).step_by(2 << depth) {
            *entry = new;
        }
        let moving = std::mem::take(&mut self.moving);
        for &reference in &moving {
            let hash = resolve(reference);
            let to = self.segment_of(hash);
            if let Some(Some(segment)) = self.segments.get_mut(to as usize) {
                segment.put(hash, reference);
            }
        }
        self.moving = moving;
        self.most_moved = self.most_moved.max(moved);
        true
    }

    /// Removes a reference; false if it is not there.
    pub fn remove(&mut self, hash: u64, reference: u32, resolve: impl Fn(u32) -> u64) -> bool {
        let at = self.segment_of(hash);
        let Some(Some(segment)) = self.segments.get_mut(at as usize) else { return false };
        let start = home(hash);
        let mut line_at = start;
        let mut found = false;
        for _ in 0..LINES {
            let Some(line) = segment.lines_mut().get_mut(line_at) else { return false };
            let mut lanes = line.with_tag(tag(hash));
            while lanes != 0 {
                if line.reference(lanes.trailing_zeros()) == reference {
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
            if let Some(line) = segment.lines_mut().get_mut(passed) {
                line.pass(-1);
            }
            passed = next(passed);
        }
        segment.count -= 1;
        self.count -= 1;
        if segment.count < MERGE_BELOW && segment.depth > 0 {
            self.merge(at, &resolve);
        }
        true
    }

    /// Joins a segment with the one it was split from, if both are nearly empty.
    fn merge(&mut self, at: u32, resolve: &impl Fn(u32) -> u64) {
        let Some(Some(segment)) = self.segments.get(at as usize) else { return };
        let (depth, bits, count) = (segment.depth, segment.bits, segment.count);
        let buddy = self.directory.get((bits ^ 1 << (depth - 1)) as usize).copied().unwrap_or(at);
        let Some(Some(other)) = self.segments.get(buddy as usize) else { return };
        if buddy == at || other.depth != depth || other.count + count > MERGED_AT_MOST {
            return;
        }
        let Some(mut gone) = self.segments.get_mut(at as usize).and_then(Option::take) else { return };
        self.free.push(at);
        self.moving.clear();
        gone.take_all(&mut self.moving);
        drop(gone);
        for entry in self.directory.iter_mut().skip(bits as usize).step_by(1 << depth) {
            *entry = buddy;
        }
        let moving = std::mem::take(&mut self.moving);
        if let Some(Some(other)) = self.segments.get_mut(buddy as usize) {
            other.depth -= 1;
            other.bits &= (1 << other.depth) - 1;
            for &reference in &moving {
                other.put(resolve(reference), reference);
            }
        }
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
        assert!(map.most_moved() <= 4096);
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
