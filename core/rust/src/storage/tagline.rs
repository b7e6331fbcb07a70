//! A line of a `TagMap`: one cache line of references and their tags.

/// Maximum number of references in a line.
pub const LANES: usize = 12;

/// A line of twelve lanes, each with a reference and 10 bits of its hash.
#[repr(C, align(64))]
pub struct Line {
    /// 8 bits of the hash of each lane, 0 for a free lane.
    bytes: [u8; LANES],
    /// In the lowest byte the number of references that overflowed to a later line, at most 255. Above it, 2 more bits
    /// of the hash of each lane.
    rest: u32,
    references: [u32; LANES],
}

const _: () = assert!(size_of::<Line>() == 64);

/// The bits of a hash that a lane stores.
#[derive(Clone, Copy)]
pub struct Tag {
    byte: u8,
    rest: u32,
}

impl Tag {
    #[inline]
    pub fn of(hash: u64) -> Self {
        Self { byte: (hash as u8).max(1), rest: (hash >> 8) as u32 & 3 }
    }
}

impl Line {
    /// Returns a bitmap of the lanes with this byte.
    #[inline]
    fn with_byte(&self, byte: u8) -> u32 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of x86_64, and a line is 64 readable bytes, aligned to 64.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_load_si128, _mm_movemask_epi8, _mm_set1_epi8};
            let bytes = _mm_load_si128(std::ptr::from_ref(self).cast::<__m128i>());
            _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8))) as u32 & ((1 << LANES) - 1)
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.bytes.iter().enumerate().fold(0, |lanes, (lane, &at)| lanes | u32::from(at == byte) << lane)
    }

    /// Returns whether a reference with this tag may be here. Compares only a part of the tag.
    #[inline]
    pub fn may_have(&self, tag: Tag) -> bool {
        self.with_byte(tag.byte) != 0
    }

    /// Returns a bitmap of the free lanes.
    #[inline]
    pub fn free(&self) -> u32 {
        self.with_byte(0)
    }

    /// Returns the first reference with this tag that `is_it` accepts, and its lane.
    #[inline]
    pub fn find(&self, tag: Tag, mut is_it: impl FnMut(u32) -> bool) -> Option<(u32, u32)> {
        let mut lanes = self.with_byte(tag.byte);
        while lanes != 0 {
            let lane = lanes.trailing_zeros();
            let reference = self.references.get(lane as usize).copied().unwrap_or(u32::MAX);
            if self.rest >> (8 + 2 * lane) & 3 == tag.rest && is_it(reference) {
                return Some((lane, reference));
            }
            lanes &= lanes - 1;
        }
        None
    }

    #[inline]
    pub fn put(&mut self, lane: u32, tag: Tag, reference: u32) {
        if let (Some(byte), Some(to)) = (self.bytes.get_mut(lane as usize), self.references.get_mut(lane as usize)) {
            *byte = tag.byte;
            *to = reference;
            self.rest = self.rest & !(3 << (8 + 2 * lane)) | tag.rest << (8 + 2 * lane);
        }
    }

    #[inline]
    pub fn clear(&mut self, lane: u32) {
        if let Some(byte) = self.bytes.get_mut(lane as usize) {
            *byte = 0;
        }
    }

    /// Removes and returns all references.
    pub fn empty(&mut self, into: &mut Vec<u32>) {
        into.extend(self.bytes.iter().zip(self.references).filter(|(byte, _)| **byte != 0).map(|(_, to)| to));
        self.bytes = [0; LANES];
        self.rest = 0;
    }

    /// Returns the number of references that overflowed to a later line.
    #[inline]
    pub fn passed(&self) -> u32 {
        self.rest & 0xFF
    }

    pub fn pass(&mut self) {
        self.rest += u32::from(self.passed() < 0xFF);
    }

    pub fn unpass(&mut self) {
        self.rest -= u32::from(self.passed() < 0xFF);
    }
}
