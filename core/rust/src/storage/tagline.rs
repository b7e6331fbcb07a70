//! A cache line of a table of references: what a `TagMap` is made of.

/// References in a line, at most.
pub const LANES: usize = 12;

/// Twelve lanes, each with a reference and 10 bits of its hash.
#[repr(C, align(64))]
pub struct Line {
    /// 8 bits of the hash for each lane, 0 where the lane is free.
    bytes: [u8; LANES],
    /// In the lowest byte the number of references that overflowed to a later line; it saturates at 255. Above it 2
    /// more bits of the hash for each lane.
    rest: u32,
    references: [u32; LANES],
}

const _: () = assert!(size_of::<Line>() == 64);

/// What a lane keeps of a hash.
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
    /// Which lanes have this byte, as bits.
    #[inline]
    fn with_byte(&self, byte: u8) -> u32 {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE2 is part of x86_64, and a line is 64 readable bytes, aligned to as many.
        unsafe {
            use std::arch::x86_64::{__m128i, _mm_cmpeq_epi8, _mm_load_si128, _mm_movemask_epi8, _mm_set1_epi8};
            let bytes = _mm_load_si128(std::ptr::from_ref(self).cast::<__m128i>());
            _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(byte as i8))) as u32 & ((1 << LANES) - 1)
        }
        #[cfg(not(target_arch = "x86_64"))]
        self.bytes.iter().enumerate().fold(0, |lanes, (lane, &at)| lanes | u32::from(at == byte) << lane)
    }

    /// Whether a reference with this tag may be here; without a look at all that is known of each.
    #[inline]
    pub fn may_have(&self, tag: Tag) -> bool {
        self.with_byte(tag.byte) != 0
    }

    /// Which lanes are free, as bits.
    #[inline]
    pub fn free(&self) -> u32 {
        self.with_byte(0)
    }

    /// The first reference with this tag that `is_it` accepts, and its lane.
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

    /// Takes everything out.
    pub fn empty(&mut self, into: &mut Vec<u32>) {
        into.extend(self.bytes.iter().zip(self.references).filter(|(byte, _)| **byte != 0).map(|(_, to)| to));
        self.bytes = [0; LANES];
        self.rest = 0;
    }

    /// How many references were passed on.
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
