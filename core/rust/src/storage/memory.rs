//! Memory straight from the system, so that it can be given back.

use std::ptr::NonNull;

/// Bytes of a page; all sizes here are multiples of it.
pub const PAGE: usize = 4096;
/// Bytes of a huge page, where the system has such.
pub const HUGE_PAGE: usize = 2 << 20;

/// Zeroed, page-aligned memory, returned to the system when dropped.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory with one owner.
unsafe impl Send for Mapping {}
// SAFETY: shared references give out nothing but an address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` of zeroes; None if the system has none left.
    #[cfg(unix)]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        // SAFETY: an anonymous private mapping at an address of the system's choice touches no memory in use.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Self { start: NonNull::new(start.cast())?, bytes })
    }

    /// `bytes` of zeroes; None if the system has none left.
    #[cfg(not(unix))]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(bytes, PAGE).ok()?;
        // SAFETY: the layout's size is not 0: all callers ask for constant sizes.
        Some(Self { start: NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?, bytes })
    }

    /// Address of the first byte.
    #[inline]
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Advises the system to use huge pages, which Linux aligns mappings of their size for.
    pub fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the range is that of the mapping, and the advice changes no content.
        unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_HUGEPAGE);
        }
    }

    /// Gives a range of pages back to the system. They read as zeroes afterwards.
    pub fn give_back(&mut self, offset: usize, bytes: usize) {
        if offset.saturating_add(bytes) > self.bytes || !offset.is_multiple_of(PAGE) {
            return;
        }
        // SAFETY: the range lies inside the mapping (checked above), which belongs to `self` alone.
        unsafe {
            let at = self.start.as_ptr().add(offset);
            #[cfg(target_os = "linux")]
            let zeroed = libc::madvise(at.cast(), bytes, libc::MADV_DONTNEED) == 0;
            #[cfg(not(target_os = "linux"))]
            let zeroed = false; // elsewhere the advice does not promise zeroes
            if !zeroed {
                at.write_bytes(0, bytes);
            }
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the memory was taken with this size and alignment, and nothing refers to it any more.
        #[cfg(unix)]
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.bytes);
        }
        #[cfg(not(unix))]
        if let Ok(layout) = std::alloc::Layout::from_size_align(self.bytes, PAGE) {
            unsafe { std::alloc::dealloc(self.start.as_ptr(), layout) }
        }
    }
}

/// Lets the allocator return free pages of its heap to the system, after much was dropped at once.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointers.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Prefetches the cache line at an address, which need not be valid, into the second-level cache: it supports more
/// outstanding misses than the first, and random lines arrive from memory at twice the rate.
#[inline]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
