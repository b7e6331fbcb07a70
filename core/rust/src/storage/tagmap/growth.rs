//! Growth and shrinking of a table of references, by one segment at a time.
//!
//! A table of `s` segments uses the buckets `s..2s`. Growth splits bucket `s` into the buckets `2s` and `2s + 1`;
//! shrinking joins them. Buckets are the leaves of a binary tree, numbered as in a heap, and the directory lists them
//! from left to right.

use super::{At, Keys, LINES, SEGMENT_BYTES, STRETCH, Segment, TagMap};
use crate::storage::memory::{HUGE_PAGE, Mapping};
use crate::storage::tagline::{LANES, Line, Tag};

/// Maximum of the average number of references in a segment. The fullest segment has 1.5 times as many: 60% of its
/// lanes. Fuller lines would overflow more often, each time with a mispredicted branch and often a cache miss.
pub const ROOMY: usize = LINES * LANES * 40 / 100;
/// The same for a table that is optimized for memory: 72% of the lanes of the fullest segment.
pub const DENSE: usize = LINES * LANES * 48 / 100;
/// Maximum number of segments: enough for 5 billion references.
const MAX_SEGMENTS: u32 = 1 << 22;
/// Distance of prefetching, in keys.
const KEYS_AHEAD: usize = 60;

impl TagMap {
    /// Makes room for `more` references. Returns false if there is not enough memory.
    #[inline]
    pub fn grow(&mut self, more: usize, keys: &impl Keys) -> bool {
        while self.count + more > self.segments as usize * self.most {
            if !self.add_segment(keys) {
                return false;
            }
        }
        true
    }

    /// Drops segments while the remaining ones would be filled to less than two thirds of the bound for growth. A table
    /// from which random references are removed shrinks with its content.
    #[inline]
    pub fn shrink_to_fit(&mut self, keys: &impl Keys) {
        while self.segments > 1 && self.count < (self.segments - 1) as usize * self.most * 2 / 3 {
            self.drop_segment(keys);
        }
    }

    /// Splits the fullest bucket.
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
        let Some(new) = self.segment(parted) else { return false };
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        if parted == 0 {
            self.directory.push(new);
        } else {
            if parted.is_power_of_two() {
                self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
                self.shift -= 1;
            }
            if let Some(place) = self.directory.get_mut(place_of(2 * parted + 1)) {
                *place = new;
            }
            self.take_all(segment_of(parted), &mut moving);
        }
        self.segments = parted + 1;
        self.put_all(&moving, keys);
        self.moving = moving;
        true
    }

    /// Joins the last two buckets.
    fn drop_segment(&mut self, keys: &impl Keys) {
        let left = self.segments - 1;
        let mut moving = std::mem::take(&mut self.moving);
        moving.clear();
        self.take_all(segment_of(left), &mut moving);
        self.take_all(left, &mut moving);
        let joined = self.segment(segment_of(left));
        if let (Some(place), Some(joined)) = (self.directory.get_mut(place_of(2 * left + 1)), joined) {
            *place = joined;
        }
        if left.is_power_of_two() {
            self.directory = self.directory.iter().step_by(2).copied().collect();
            self.shift += 1;
        }
        self.segments = left;
        self.put_all(&moving, keys);
        self.moving = moving;
        let used = left as usize % STRETCH;
        if used == 0 {
            self.stretches.pop();
        } else if let Some(last) = self.stretches.last_mut() {
            last.give_back(used * SEGMENT_BYTES, SEGMENT_BYTES);
        }
    }

    /// Returns the segment with a number.
    fn segment(&self, number: u32) -> Option<Segment> {
        let stretch = self.stretches.get(number as usize / STRETCH)?;
        // SAFETY: a stretch has STRETCH segments, so the address lies inside its mapping.
        Some(Segment(unsafe { stretch.start().cast::<Line>().add(number as usize % STRETCH * LINES) }))
    }

    /// Empties a segment.
    fn take_all(&mut self, segment: u32, into: &mut Vec<u32>) {
        let Some(segment) = self.segment(segment) else { return };
        for line in 0..=u8::MAX {
            self.line_mut(At { segment, line }).empty(into);
        }
    }

    /// Puts references into their home lines.
    fn put_all(&mut self, moving: &[u32], keys: &impl Keys) {
        for reference in moving.iter().take(KEYS_AHEAD) {
            keys.prefetch(*reference);
        }
        for (at, &reference) in moving.iter().enumerate() {
            if let Some(ahead) = moving.get(at + KEYS_AHEAD) {
                keys.prefetch(*ahead);
            }
            let hash = keys.hash(reference);
            if !self.home(hash).is_some_and(|home| self.put_from(home, Tag::of(hash), reference)) {
                self.count -= 1;
            }
        }
        self.most_moved = self.most_moved.max(moving.len());
    }
}

/// Returns the number of a bucket's segment. A bucket with an even number has the segment of the bucket it came from.
#[inline]
fn segment_of(bucket: u32) -> u32 {
    bucket >> (bucket.trailing_zeros() + 1)
}

/// Returns the index of a bucket of the lowest level in the directory: its number within the level.
fn place_of(bucket: u32) -> usize {
    (bucket - (1 << bucket.ilog2())) as usize
}
