//! Learns the speed of ranks from first tokens. `kvrouter.core.interface.speeds` has the formulas.

use std::collections::HashMap;

use crate::index::tree::ranks::Name;
use crate::load::cache_recency::CachedRank;

const WINDOW: f64 = 50.0;
const DOUBT: f64 = 4.0;
const SPREAD: f64 = 0.25;
const LEAST_SPREAD: f64 = 0.1;
const SPREAD_STEP: f64 = 0.02;
const TRAFFIC: f64 = 0.2;
const HALF_LIFE_S: f64 = 300.0;
const WIDEST: f64 = 4.0;
const REFRESH_S: f64 = 0.1;
const STEP: f64 = 0.02;
const FACTOR_HALF_LIFE_S: f64 = 120.0;
const PRIOR: f64 = 3.0;
const WIDEST_FACTOR: f64 = 16.0;

fn limited(ratio: f64, widest: f64) -> f64 {
    ratio.max(1.0 / widest).min(widest)
}

/// First tokens of one incarnation of a rank.
#[derive(Clone)]
struct Mean {
    incarnation: u64,
    number: u64,
    weight: f64,
    mean: f64,
    updated: f64,
}

impl Mean {
    fn weight_at(&self, now: f64) -> f64 {
        self.weight * 2f64.powf((self.updated - now) / HALF_LIFE_S)
    }
}

/// Relative latency of a rank at one time, and the number of its mean; 0 if the rank is not registered.
pub type Speed = (f64, u64);

/// The calibration of a component, and the relative latencies of its ranks.
pub struct Calibration {
    pub value: f64,
    means: Vec<Mean>,
    places: HashMap<Name, usize>,
    /// Place of each mean by its number.
    numbers: HashMap<u64, usize>,
    numbered: u64,
    variance: f64,
    row: Vec<f64>,
    refresh_at: f64,
}

impl Calibration {
    pub fn new() -> Self {
        Self {
            value: 1.0,
            means: Vec::new(),
            places: HashMap::new(),
            numbers: HashMap::new(),
            numbered: 0,
            variance: SPREAD * SPREAD,
            row: Vec::new(),
            refresh_at: f64::NEG_INFINITY,
        }
    }

    /// Replaces the registered ranks. A known one of the same incarnation keeps its mean.
    pub fn set_ranks(&mut self, ranks: &[CachedRank]) {
        let mut means = Vec::with_capacity(ranks.len());
        for (rank, incarnation, _) in ranks {
            let known = self.places.get(rank).and_then(|place| self.means.get(*place));
            means.push(known.filter(|mean| mean.incarnation == *incarnation).cloned().unwrap_or_else(|| {
                self.numbered += 1;
                Mean { incarnation: *incarnation, number: self.numbered, weight: 0.0, mean: 0.0, updated: 0.0 }
            }));
        }
        self.places = ranks.iter().enumerate().map(|(place, (rank, ..))| (*rank, place)).collect();
        self.numbers = means.iter().enumerate().map(|(place, mean)| (mean.number, place)).collect();
        self.means = means;
        self.refresh_at = f64::NEG_INFINITY;
    }

    /// Returns what is known of a rank.
    pub fn speed(&mut self, rank: Name, now: f64) -> Speed {
        let Some(place) = self.places.get(&rank).copied() else { return (1.0, 0) };
        let latency = self.relative_latency(now).get(place).copied().unwrap_or(1.0);
        (latency, self.means.get(place).map_or(0, |mean| mean.number))
    }

    /// Learns from a first token, given the speed that was known at the dispatch.
    pub fn learn(&mut self, measured_ms: f64, forecast_ms: f64, (latency, number): Speed, now: f64) {
        if forecast_ms <= 0.0 {
            return;
        }
        let ratio = measured_ms / forecast_ms;
        if let Some(mean) = self.numbers.get(&number).and_then(|place| self.means.get_mut(*place)) {
            let weight = mean.weight_at(now);
            let off = limited(ratio, WIDEST).ln() - mean.mean;
            if weight >= 1.0 {
                // From a mean of n, a value lies further off than from the true one: by (n + 1) / n in its square.
                self.variance += SPREAD_STEP * (off * off * weight / (weight + 1.0) - self.variance);
            }
            mean.weight = (weight + 1.0).min(WINDOW);
            mean.updated = now;
            mean.mean += off / mean.weight;
        }
        self.value *= limited(ratio / latency, WIDEST).powf(STEP);
    }

    /// Returns the relative latency of each registered rank.
    pub fn relative_latency(&mut self, now: f64) -> &[f64] {
        if now >= self.refresh_at {
            self.row = self.estimate(now);
            self.refresh_at = now + REFRESH_S;
        }
        &self.row
    }

    fn estimate(&self, now: f64) -> Vec<f64> {
        let weights: Vec<f64> = self.means.iter().map(|mean| mean.weight_at(now)).collect();
        let weighed = || self.means.iter().map(|mean| mean.mean).zip(&weights);
        let total: f64 = weights.iter().sum();
        let common = if total > 0.0 { weighed().map(|(mean, weight)| weight * mean).sum::<f64>() / total } else { 0.0 };
        let spread = self.variance.max(LEAST_SPREAD * LEAST_SPREAD);
        let latency = |(mean, weight): (f64, &f64)| {
            let deviation = mean - common;
            // Infinite without first tokens.
            let doubt = (DOUBT * DOUBT * spread / weight).max(TRAFFIC * TRAFFIC);
            if deviation * deviation > doubt { limited((deviation - doubt / deviation).exp(), WIDEST) } else { 1.0 }
        };
        weighed().map(latency).collect()
    }
}

/// Measured over modelled times, of which the model counts as the first measurements.
pub struct Factor {
    pub count: u64,
    mean: f64,
    /// Measurements in the mean, the model included.
    weight: f64,
    last: f64,
}

impl Factor {
    pub fn new() -> Self {
        Self { count: 0, mean: 0.0, weight: PRIOR, last: 0.0 }
    }

    /// Returns the factor at a time in seconds.
    pub fn value(&self, now: f64) -> f64 {
        self.faded(now).0.exp()
    }

    /// Adds a measurement.
    pub fn observe(&mut self, measured_ms: f64, modelled_ms: f64, now: f64) {
        if measured_ms <= 0.0 || modelled_ms <= 0.0 {
            return;
        }
        self.count += 1;
        let (mean, weight) = self.faded(now - measured_ms / 1e3);
        self.weight = (weight + 1.0).min(WINDOW);
        self.mean = mean + (limited(measured_ms / modelled_ms, WIDEST_FACTOR).ln() - mean) / self.weight;
        self.last = now;
    }

    /// Returns mean and weight at a time: the model replaces faded measurements.
    fn faded(&self, now: f64) -> (f64, f64) {
        let left = self.weight * 0.5f64.powf((now - self.last).max(0.0) / FACTOR_HALF_LIFE_S);
        let weight = left + PRIOR * (1.0 - left / self.weight);
        (self.mean * left / weight, weight)
    }
}
