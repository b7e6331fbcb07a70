//! Memory mapped from the operating system, so that it can be returned at once.

use std::ptr::NonNull;

/// Size of a page in bytes. All sizes are multiples of it.
pub const PAGE: usize = 4096;
/// Size of a huge page in bytes, on systems that have them.
pub const HUGE_PAGE: usize = 2 << 20;

/// Zeroed, page-aligned memory, returned to the system when dropped.
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is memory with one owner.
unsafe impl Send for Mapping {}
// SAFETY: a shared reference gives access to the address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of zeroes; None if there is not enough memory.
    #[cfg(unix)]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        // SAFETY: an anonymous private mapping at an address chosen by the system overlaps no memory in use.
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

    /// Maps `bytes` of zeroes; None if there is not enough memory.
    #[cfg(not(unix))]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let layout = std::alloc::Layout::from_size_align(bytes, PAGE).ok()?;
        // SAFETY: the layout's size is not 0: all callers ask for constant sizes.
        Some(Self { start: NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?, bytes })
    }

    /// Returns the address of the first byte.
    #[inline]
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Advises the system to use huge pages. Linux aligns mappings of this size accordingly.
    pub fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the range is that of the mapping, and the advice changes no content.
        unsafe {
            libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_HUGEPAGE);
        }
    }

    /// Returns a range of pages to the system. They read as zeroes afterwards.
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
            let zeroed = false; // other systems do not guarantee zeroes after the advice
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

/// Makes the allocator return free pages of its heap to the system. Call it after a large part was dropped.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes no pointers.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Prefetches the cache line at an address, which need not be valid, to the second-level cache. It supports more
/// outstanding misses than the first level, so that random lines arrive from memory at twice the rate.
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
