//! Decides when free memory is returned to the system: after a large share of many entries was removed.

/// Peaks below this never trim. The allocator then keeps at most about 60 MB, which is not worth the time of a trim: a
/// tenth of a second for ten times as many entries.
const MIN_PEAK: usize = 1 << 20;

/// Tracks the number of entries since the last trim.
#[derive(Default)]
pub struct TrimWatermark {
    peak: usize,
}

impl TrimWatermark {
    /// Records the current count. Returns whether to trim: the peak was large, and three quarters of it were removed.
    pub fn observe(&mut self, count: usize) -> bool {
        self.peak = self.peak.max(count);
        let fallen = self.peak >= MIN_PEAK && count <= self.peak / 4;
        if fallen {
            self.peak = count;
        }
        fallen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fall_trims_once() {
        let mut watermark = TrimWatermark::default();
        let counts = [0, 10, 0, MIN_PEAK, MIN_PEAK / 2, MIN_PEAK / 4, 5, 0, 2 * MIN_PEAK, 0];
        let trims = counts.map(|count| watermark.observe(count));
        assert_eq!(trims, [false, false, false, false, false, true, false, false, false, true]);
    }
}
