//! Pauses between attempts, random so that a fleet does not retry at one moment.

use std::time::Duration;

/// Pauses that grow from `first` to `longest`.
pub struct Backoff {
    next: Duration,
    longest: Duration,
}

impl Backoff {
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest }
    }

    /// Waits; the next time up to twice as long.
    pub async fn pause(&mut self) {
        let factor = 0.5 + random_share();
        tokio::time::sleep(self.next.mul_f64(factor)).await;
        self.next = (self.next * 2).min(self.longest);
    }
}

/// Returns a random number from 0 to 1.
fn random_share() -> f64 {
    getrandom::u32().map_or(0.5, |number| f64::from(number) / f64::from(u32::MAX))
}
