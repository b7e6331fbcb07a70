//! A memory bound that the indexes of a process share.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the memory of several indexes against one bound.
pub struct MemoryBudget {
    max_bytes: u64,
    used_bytes: AtomicU64,
}

impl MemoryBudget {
    /// Creates a budget of `max_bytes`; 0 is no bound.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, used_bytes: AtomicU64::new(0) }
    }

    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Returns the memory of all indexes as of their last changes, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Returns whether the indexes exceed the bound.
    pub fn is_exceeded(&self) -> bool {
        self.max_bytes > 0 && self.used_bytes() > self.max_bytes
    }

    /// Replaces an index's share of `before` bytes by one of `now` bytes.
    pub fn charge(&self, before: u64, now: u64) {
        if before != now {
            // The difference wraps if the share shrinks; the sum then wraps back.
            self.used_bytes.fetch_add(now.wrapping_sub(before), Ordering::Relaxed);
        }
    }
}
