//! Allocator of small units in 4 KiB pages. Empty pages are returned to the system.
//!
//! A page contains the bitmap of its live units. A page of zeroes is thus an empty page, and a page that was returned
//! needs no bookkeeping. Growth adds a segment of pages and moves nothing.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::storage::memory::{Mapping, PAGE};

/// A page of units.
///
/// # Safety
/// The type is 4096 bytes long, aligned to at most that, and any zeroed memory is a valid, empty page.
pub unsafe trait Page {
    /// Number of units in a page: at most `1 << SHIFT`, and at most 64.
    const UNITS: u32;
    /// A unit's id is its page's number shifted left by this, plus its number in the page.
    const SHIFT: u32;
    /// Returns the bitmap of live units.
    fn live(&self) -> u64;
    /// Sets the bitmap of live units.
    fn set_live(&mut self, live: u64);
}

const SEGMENT_PAGES: u32 = 256;
/// Ids stay below this, which leaves room for 8 lanes and a flag in 32 bits.
const MAX_ID: u32 = 1 << 28;
/// Minimum number of empty pages to keep. Those above it and above a sixteenth of all pages are returned to the system.
const KEPT_PAGES: usize = 32;

/// An arena of pages.
pub struct Pages<P: Page> {
    segments: Vec<Mapping>,
    /// Number of pages used so far. Each of them is in memory or was returned.
    pages: u32,
    current: u32,
    /// Pages with free units, without the current page and without duplicates.
    roomy: Vec<u32>,
    /// Pages that became empty and were not returned yet; may contain pages that are in use again.
    empty: Vec<u32>,
    /// Whether each page is in memory.
    resident: Vec<bool>,
    resident_pages: usize,
    null: Box<P>,
    units: usize,
    kind: PhantomData<P>,
}

impl<P: Page> Pages<P> {
    pub fn new(null: Box<P>) -> Self {
        Self {
            segments: Vec::new(),
            pages: 0,
            current: u32::MAX,
            roomy: Vec::new(),
            empty: Vec::new(),
            resident: Vec::new(),
            resident_pages: 0,
            null,
            units: 0,
            kind: PhantomData,
        }
    }

    #[inline]
    fn address(&self, page: u32) -> Option<NonNull<P>> {
        let segment = self.segments.get((page / SEGMENT_PAGES) as usize)?;
        // SAFETY: a segment has SEGMENT_PAGES pages, so the address lies inside its mapping.
        Some(unsafe { segment.start().cast::<P>().add((page % SEGMENT_PAGES) as usize) })
    }

    /// Returns the page of a unit; an empty page for an id that was never allocated.
    #[inline]
    pub fn page(&self, id: u32) -> &P {
        match self.address(id >> P::SHIFT) {
            // SAFETY: the address is that of a page in a live mapping, which is valid because it is zeroed or written,
            // and the reference does not outlive the borrow of `self`.
            Some(page) => unsafe { page.as_ref() },
            None => &self.null,
        }
    }

    /// Returns the page of a unit for changes; a scratch page for an id that was never allocated.
    #[inline]
    pub fn page_mut(&mut self, id: u32) -> &mut P {
        match self.address(id >> P::SHIFT) {
            // SAFETY: as in `page`, with `self` borrowed exclusively.
            Some(mut page) => unsafe { page.as_mut() },
            None => &mut self.null,
        }
    }

    /// Returns the number of a unit in its page.
    #[inline]
    pub const fn unit(id: u32) -> usize {
        (id & ((1 << P::SHIFT) - 1)) as usize
    }

    const FULL: u64 = if P::UNITS == 64 { u64::MAX } else { (1 << P::UNITS) - 1 };

    /// Allocates a unit with unspecified content; None if there is not enough memory or no free id.
    pub fn allocate(&mut self) -> Option<u32> {
        let mut page = self.current;
        if page == u32::MAX || self.page(page << P::SHIFT).live() == Self::FULL {
            page = match self.roomy.pop() {
                Some(page) => page,
                None => self.fresh_page()?,
            };
            self.current = page;
        }
        let id = page << P::SHIFT;
        let header = self.page_mut(id);
        let live = header.live();
        let unit = (!live).trailing_zeros();
        header.set_live(live | 1 << unit);
        self.units += 1;
        if let Some(resident) = self.resident.get_mut(page as usize)
            && !*resident
        {
            *resident = true;
            self.resident_pages += 1;
        }
        Some(id | unit)
    }

    fn fresh_page(&mut self) -> Option<u32> {
        let page = self.pages;
        if page >= MAX_ID >> P::SHIFT {
            return None;
        }
        if page.is_multiple_of(SEGMENT_PAGES) && self.segments.len() <= (page / SEGMENT_PAGES) as usize {
            self.segments.push(Mapping::zeroed(SEGMENT_PAGES as usize * PAGE)?);
        }
        self.pages += 1;
        self.resident.push(false);
        Some(page)
    }

    /// Frees a unit that `allocate` returned.
    pub fn free(&mut self, id: u32) {
        let page = id >> P::SHIFT;
        let header = self.page_mut(id);
        let before = header.live();
        let after = before & !(1 << Self::unit(id));
        if after == before {
            return;
        }
        header.set_live(after);
        self.units -= 1;
        if before == Self::FULL && page != self.current {
            self.roomy.push(page);
        }
        if after == 0 {
            self.empty.push(page);
        }
    }

    /// Returns empty pages to the system, except a few that are kept for use.
    pub fn give_back(&mut self) {
        let kept = KEPT_PAGES.max(self.resident_pages / 16);
        if self.empty.len() <= kept {
            return;
        }
        let mut pages = std::mem::take(&mut self.empty);
        pages.sort_unstable();
        pages.dedup();
        pages.retain(|&page| {
            page != self.current
                && self.resident.get(page as usize) == Some(&true)
                && self.page(page << P::SHIFT).live() == 0
        });
        let keep = pages.len().min(kept / 2);
        let going = pages.split_off(keep);
        self.empty = pages;
        for neighbours in going.chunk_by(|a, b| a + 1 == *b && !b.is_multiple_of(SEGMENT_PAGES)) {
            let Some(&first) = neighbours.first() else { continue };
            if let Some(segment) = self.segments.get_mut((first / SEGMENT_PAGES) as usize) {
                segment.give_back((first % SEGMENT_PAGES) as usize * PAGE, neighbours.len() * PAGE);
            }
            for &page in neighbours {
                if let Some(resident) = self.resident.get_mut(page as usize) {
                    *resident = false;
                    self.resident_pages -= 1;
                }
            }
        }
    }

    /// Returns the memory in use, in bytes.
    pub fn bytes(&self) -> usize {
        self.resident_pages * PAGE + self.resident.capacity() + 4 * (self.roomy.capacity() + self.empty.capacity())
    }

    /// Returns the number of live units.
    #[cfg(test)]
    pub fn units(&self) -> usize {
        self.units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C, align(4096))]
    struct Words {
        live: u64,
        words: [u64; 60],
    }

    // SAFETY: 4096 bytes (by its alignment) of integers.
    unsafe impl Page for Words {
        const UNITS: u32 = 60;
        const SHIFT: u32 = 6;
        fn live(&self) -> u64 {
            self.live
        }
        fn set_live(&mut self, live: u64) {
            self.live = live;
        }
    }

    fn pages() -> Pages<Words> {
        Pages::new(Box::new(Words { live: 0, words: [0; 60] }))
    }

    #[test]
    fn ids_are_distinct_and_come_back() {
        let mut pages = pages();
        let ids: Vec<u32> = (0..100_000).map(|_| pages.allocate().unwrap()).collect();
        for (at, &id) in ids.iter().enumerate() {
            pages.page_mut(id).words[Pages::<Words>::unit(id)] = at as u64;
        }
        for (at, &id) in ids.iter().enumerate() {
            assert_eq!(pages.page(id).words[Pages::<Words>::unit(id)], at as u64);
        }
        let grown = pages.bytes();
        for &id in &ids {
            pages.free(id);
        }
        assert_eq!(pages.units(), 0);
        pages.give_back();
        assert!(pages.bytes() < grown / 4, "{} of {grown}", pages.bytes());
        let again: Vec<u32> = (0..100_000).map(|_| pages.allocate().unwrap()).collect();
        assert!(again.iter().max().unwrap() >> 6 <= ids.iter().max().unwrap() >> 6);
        let distinct: std::collections::HashSet<u32> = again.into_iter().collect();
        assert_eq!(distinct.len(), 100_000);
    }

    #[test]
    fn unknown_ids_are_empty_and_harmless() {
        let mut pages = pages();
        assert_eq!(pages.page(12345).live(), 0);
        pages.free(12345);
        assert_eq!(pages.units(), 0);
    }
}
