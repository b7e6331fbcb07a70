//! A hash table of 32-bit references to keys, about 13 bytes each. It stores 10 bits of the key's hash beside each.
//!
//! The table does not contain the keys: a lookup yields references that may match, and the caller compares the keys.
//! A key may be present several times. A line is one cache line with twelve references and their tags. References that
//! do not fit into their line overflow to the next one. Each line counts its overflows, so that a lookup knows where to
//! stop and a removal leaves no tombstone.
//!
//! Lines are in segments of 16 KiB, and the table grows by one segment at a time (spiral storage, see `growth`). Hashes
//! are transformed so that the load of bucket `b` is proportional to 1/b. The next bucket to split is then always the
//! fullest one, so that the table is equally full at every size and each step of growth costs the same. A directory
//! maps the first bits of a transformed hash to the segment of its bucket.

mod growth;

use std::ptr::NonNull;

use crate::storage::memory::{HUGE_PAGE, Mapping, prefetch};
use crate::storage::tagline::{Line, Tag};

/// Number of lines in a segment: all values of a u8.
const LINES: usize = 256;
const SEGMENT_BYTES: usize = LINES * 64;
/// Number of segments in a mapping, which has the size of a huge page.
const STRETCH: usize = HUGE_PAGE / SEGMENT_BYTES;
/// Number of lines that are prefetched together while the group before is processed; at most 32.
const GROUP: usize = 32;

/// The keys that references refer to.
pub trait Keys {
    /// Returns the hash of a reference's key.
    fn hash(&self, reference: u32) -> u64;
    /// Prefetches the key's cache line.
    fn prefetch(&self, _reference: u32) {}
}

impl<F: Fn(u32) -> u64> Keys for F {
    fn hash(&self, reference: u32) -> u64 {
        self(reference)
    }
}

/// A segment of a table. Valid until the table drops the segment.
#[derive(Clone, Copy)]
struct Segment(NonNull<Line>);

// SAFETY: a segment is the address of memory that its table owns; access to it requires a borrow of the table.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// A line of a table. Valid until the table grows or shrinks.
#[derive(Clone, Copy)]
struct At {
    segment: Segment,
    line: u8,
}

impl At {
    #[inline]
    fn address(self) -> NonNull<Line> {
        // SAFETY: a segment has 256 lines.
        unsafe { self.segment.0.add(usize::from(self.line)) }
    }

    /// Returns the line to which this one overflows.
    #[inline]
    fn next(self) -> Self {
        Self { line: self.line.wrapping_add(1), ..self }
    }
}

/// The table.
pub struct TagMap {
    stretches: Vec<Mapping>,
    segments: u32,
    /// The segment for each value of the first bits of transformed hashes; empty in a table that was never used.
    directory: Vec<Segment>,
    /// Shift from a transformed hash of 32 bits to its index in the directory.
    shift: u32,
    /// Maximum of the average number of references in a segment.
    most: usize,
    count: usize,
    moving: Vec<u32>,
    most_moved: usize,
}

impl TagMap {
    /// Creates a table that is optimized for speed.
    pub fn new() -> Self {
        Self::filled_to(growth::ROOMY)
    }

    /// Creates a table with 11 instead of 13 bytes for each reference. It is a little slower.
    pub fn dense() -> Self {
        Self::filled_to(growth::DENSE)
    }

    fn filled_to(most: usize) -> Self {
        Self {
            most,
            stretches: Vec::new(),
            segments: 0,
            directory: Vec::new(),
            shift: 32,
            count: 0,
            moving: Vec::new(),
            most_moved: 0,
        }
    }

    /// Returns the number of references.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns the memory of the table, in bytes.
    pub fn bytes(&self) -> usize {
        self.segments as usize * SEGMENT_BYTES
            + self.directory.capacity() * size_of::<Segment>()
            + self.stretches.capacity() * size_of::<Mapping>()
            + self.moving.capacity() * 4
    }

    /// Returns the maximum number of references that one operation has moved.
    pub fn most_moved(&self) -> usize {
        self.most_moved
    }

    /// Returns the home line of a hash; None in a table without segments.
    #[inline]
    fn home(&self, hash: u64) -> Option<At> {
        // x * (5 + 3 * x) / 8 approximates 2^x - 1 well enough for even loads.
        const FLAT: u64 = 5 << 29;
        let x = hash >> 32;
        let spread = (x * (FLAT + ((x * 3) >> 3))) >> 32;
        let segment = *self.directory.get((spread >> self.shift) as usize)?;
        Some(At { segment, line: (hash >> 24) as u8 })
    }

    #[inline]
    fn line(&self, at: At) -> &Line {
        // SAFETY: the table has not changed since it returned `at`, so the line is in a live mapping. It is aligned,
        // any bytes are a valid line, and the reference does not outlive the borrow of `self`.
        unsafe { at.address().as_ref() }
    }

    #[inline]
    fn line_mut(&mut self, at: At) -> &mut Line {
        // SAFETY: as in `line`, with `self` borrowed exclusively.
        unsafe { at.address().as_mut() }
    }

    /// Prefetches the cache line of a hash.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        if let Some(home) = self.home(hash) {
            prefetch(home.address().as_ptr());
        }
    }

    /// Returns the first reference under a hash that `is_it` accepts. `is_it` may be called with references of other
    /// hashes.
    #[inline]
    pub fn find(&self, hash: u64, is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        self.find_from(self.home(hash)?, Tag::of(hash), is_it)
    }

    #[inline]
    fn find_from(&self, home: At, tag: Tag, mut is_it: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut at = home;
        for _ in 0..LINES {
            let line = self.line(at);
            if let Some((_, reference)) = line.find(tag, &mut is_it) {
                return Some(reference);
            }
            if line.passed() == 0 {
                return None;
            }
            at = at.next();
        }
        None
    }

    /// Inserts references in order, and stops before the first one for which `is_same`, called with its number and a
    /// stored reference of the same hash, returns true. Returns how many were inserted. Call `grow` first.
    pub fn insert_alone(&mut self, references: &[(u64, u32)], is_same: impl Fn(usize, u32) -> bool) -> usize {
        let mut number = 0;
        let Some(mut ahead) = self.nowhere() else { return 0 };
        self.prefetch_homes(references, &mut ahead);
        for group in references.chunks(GROUP) {
            let homes = ahead;
            self.prefetch_homes(references.get(number + GROUP..).unwrap_or_default(), &mut ahead);
            // References whose line overflowed or is full. They are checked after the others were inserted.
            let mut later = 0u32;
            for (at, (&(hash, reference), &home)) in group.iter().zip(&homes).enumerate() {
                let tag = Tag::of(hash);
                let line = self.line_mut(home);
                let free = line.free();
                if free != 0 && line.passed() == 0 && !line.may_have(tag) {
                    line.put(free.trailing_zeros(), tag, reference);
                } else {
                    prefetch(home.next().address().as_ptr());
                    later |= 1 << at;
                }
            }
            while later != 0 {
                let at = later.trailing_zeros() as usize;
                let (Some(&(hash, reference)), Some(&home)) = (group.get(at), homes.get(at)) else { break };
                let tag = Tag::of(hash);
                let alone = self.find_from(home, tag, |other| is_same(number + at, other)).is_none();
                if !alone || !self.put_from(home, tag, reference) {
                    for (after, (&(hash, reference), &home)) in group.iter().zip(&homes).enumerate().skip(at + 1) {
                        if later >> after & 1 == 0 {
                            self.remove_from(home, Tag::of(hash), reference);
                        }
                    }
                    self.count += number + at;
                    return number + at;
                }
                later &= later - 1;
            }
            number += group.len();
        }
        self.count += number;
        number
    }

    /// Returns how many of the hashes, in order, have no reference that `is_same`, called with the hash's number and
    /// the reference, accepts.
    pub fn absent(&mut self, hashes: &[(u64, u32)], is_same: impl Fn(usize, u32) -> bool) -> usize {
        if self.count == 0 {
            return hashes.len();
        }
        self.at_homes(hashes, |map, home, number, hash, _| {
            map.find_from(home, Tag::of(hash), |other| is_same(number, other)).is_none()
        })
    }

    /// Removes references and ignores missing ones. Call `shrink_to_fit` afterwards.
    pub fn remove_all(&mut self, references: &[(u64, u32)]) {
        self.at_homes(references, |map, home, _, hash, reference| {
            map.count -= usize::from(map.remove_from(home, Tag::of(hash), reference));
            true
        });
    }

    /// Calls `work` at the home line of each hash, in order, until it returns false. Returns how often it returned
    /// true. Lines are prefetched in groups.
    #[inline]
    fn at_homes(
        &mut self,
        hashes: &[(u64, u32)],
        mut work: impl FnMut(&mut Self, At, usize, u64, u32) -> bool,
    ) -> usize {
        let mut number = 0;
        let Some(mut ahead) = self.nowhere() else { return 0 };
        self.prefetch_homes(hashes, &mut ahead);
        for group in hashes.chunks(GROUP) {
            let homes = ahead;
            self.prefetch_homes(hashes.get(number + GROUP..).unwrap_or_default(), &mut ahead);
            for (&(hash, reference), &home) in group.iter().zip(&homes) {
                if !work(self, home, number, hash, reference) {
                    return number;
                }
                number += 1;
            }
        }
        number
    }

    /// Returns a buffer for the home lines of a group.
    fn nowhere(&self) -> Option<[At; GROUP]> {
        Some([At { segment: *self.directory.first()?, line: 0 }; GROUP])
    }

    /// Prefetches the home lines of a group.
    #[inline]
    fn prefetch_homes(&self, hashes: &[(u64, u32)], homes: &mut [At; GROUP]) {
        for (home, (hash, _)) in homes.iter_mut().zip(hashes) {
            let Some(at) = self.home(*hash) else { return };
            prefetch(at.address().as_ptr());
            *home = at;
        }
    }

    /// Inserts a reference. Returns false if there is not enough memory, or if the table has thousands of equal keys.
    pub fn insert(&mut self, hash: u64, reference: u32, keys: impl Keys) -> bool {
        if !self.grow(1, &keys) {
            return false;
        }
        let inserted = self.home(hash).is_some_and(|home| self.put_from(home, Tag::of(hash), reference));
        self.count += usize::from(inserted);
        inserted
    }

    /// Puts a reference into the first line with a free lane, starting at its home line.
    #[inline]
    fn put_from(&mut self, home: At, tag: Tag, reference: u32) -> bool {
        let mut at = home;
        for _ in 0..LINES {
            let line = self.line_mut(at);
            let free = line.free();
            if free != 0 {
                line.put(free.trailing_zeros(), tag, reference);
                return true;
            }
            line.pass();
            at = at.next();
        }
        // No line has a free lane, and each has counted one more overflow.
        self.unpass(home, home);
        false
    }

    /// Decreases the overflow counts from a reference's home line up to another line; of all lines if they are equal.
    fn unpass(&mut self, home: At, to: At) {
        let mut at = home;
        loop {
            self.line_mut(at).unpass();
            at = at.next();
            if at.line == to.line {
                return;
            }
        }
    }

    /// Removes a reference. Returns false if it is missing.
    pub fn remove(&mut self, hash: u64, reference: u32, keys: impl Keys) -> bool {
        let removed = self.home(hash).is_some_and(|home| self.remove_from(home, Tag::of(hash), reference));
        self.count -= usize::from(removed);
        self.shrink_to_fit(&keys);
        removed
    }

    #[inline]
    fn remove_from(&mut self, home: At, tag: Tag, reference: u32) -> bool {
        let mut at = home;
        for _ in 0..LINES {
            let line = self.line_mut(at);
            if let Some((lane, _)) = line.find(tag, |other| other == reference) {
                line.clear(lane);
                if at.line != home.line {
                    self.unpass(home, at);
                }
                return true;
            }
            if line.passed() == 0 {
                return false;
            }
            at = at.next();
        }
        false
    }

    /// Frees all memory of an empty table.
    pub fn shrink(&mut self) {
        if self.count == 0 {
            *self = Self { most_moved: self.most_moved, ..Self::filled_to(self.most) };
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
            assert!(map.grow(1, &hash));
            if map.insert_alone(&[(hash(key), key)], |_, other| other == key) == 0 {
                assert!(map.insert(hash(key), key, hash));
            }
            if key >= 100_000 && key.is_multiple_of(1000) {
                assert!(map.bytes() < 15 * key as usize, "{} for {key}", map.bytes());
            }
        }
        assert!((1500..=2200).contains(&map.most_moved()), "{}", map.most_moved());
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
        let mut visited = 0;
        assert_eq!(
            map.find(7 << 40, |_| {
                visited += 1;
                false
            }),
            None
        );
        assert_eq!(visited, 300);
        assert!((0..300).rev().all(|reference| map.remove(7 << 40, reference, |_| 7 << 40)));
        assert_eq!(map.len(), 0);
    }

    #[test]
    fn a_dense_table_stays_dense_when_it_was_empty() {
        let secret = Secret::random();
        let hash = |key: u32| secret.mix(u64::from(key));
        let mut map = TagMap::dense();
        for _ in 0..2 {
            map.shrink();
            assert_eq!(map.bytes(), 0);
            for key in 0..100_000u32 {
                assert!(map.insert(hash(key), key, hash));
            }
            assert!(map.bytes() < 1_200_000, "{}", map.bytes());
            for key in 0..100_000u32 {
                assert!(map.remove(hash(key), key, hash));
            }
        }
    }
}
