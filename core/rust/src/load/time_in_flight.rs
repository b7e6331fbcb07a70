//! Mean time of a booking from its beginning to its end.

/// Bookings over which the mean time in flight is taken, and those after which it is taken again.
const MEAN_BOOKINGS: f64 = 64.0;
const MEAN_STEP: u32 = 8;

/// Mean time from booking to end: booked seconds over ended bookings.
pub struct TimeInFlight {
    mean: f64,
    booked_seconds: f64,
    ended: f64,
    until_mean: u32,
    counted_until: f64,
}

impl TimeInFlight {
    pub fn new() -> Self {
        Self { mean: f64::INFINITY, booked_seconds: 0.0, ended: 0.0, until_mean: MEAN_STEP, counted_until: 0.0 }
    }

    /// Returns the mean in seconds; infinite while too few have ended.
    pub fn seconds(&self) -> f64 {
        self.mean
    }

    /// Counts the time of so many live bookings.
    pub fn count(&mut self, live: usize, now: f64) {
        self.booked_seconds += live as f64 * (now - self.counted_until);
        self.counted_until = now;
    }

    /// Counts the end of one of so many live bookings.
    pub fn end(&mut self, live: usize, now: f64) {
        self.count(live, now);
        self.ended += 1.0;
        self.until_mean -= 1;
        if self.until_mean == 0 {
            self.until_mean = MEAN_STEP;
            self.mean = self.booked_seconds / self.ended;
            if self.ended >= MEAN_BOOKINGS {
                self.booked_seconds /= 2.0;
                self.ended /= 2.0;
            }
        }
    }
}
