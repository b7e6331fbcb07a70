//! The latest load of each rank, as the engine reports it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::config::unix_ns;
use crate::contract::LoadReport;

#[derive(Default)]
struct Latest {
    reports: BTreeMap<u32, LoadReport>,
    /// Ranks whose report was not published yet.
    unpublished: Vec<u32>,
    sequence: u64,
}

/// Numbers the reports, and keeps the latest one of each rank.
#[derive(Default)]
pub struct Loads {
    latest: Mutex<Latest>,
    pub changed: Notify,
}

impl Loads {
    fn lock(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces a rank's report. Sets its number and its time.
    pub fn report(&self, dp_rank: u32, report: LoadReport) {
        let mut latest = self.lock();
        latest.sequence += 1;
        let report = LoadReport { measured_unix_ns: unix_ns(), sequence: Some(latest.sequence), ..report };
        latest.reports.insert(dp_rank, report);
        if !latest.unpublished.contains(&dp_rank) {
            latest.unpublished.push(dp_rank);
        }
        drop(latest);
        self.changed.notify_one();
    }

    /// Returns the latest report of each rank.
    pub fn latest(&self) -> Vec<LoadReport> {
        self.lock().reports.values().cloned().collect()
    }

    /// Returns (rank, report) of the ranks with a report that was not published yet, which it is from now on.
    pub fn take_unpublished(&self) -> Vec<(u32, LoadReport)> {
        let mut latest = self.lock();
        let ranks = std::mem::take(&mut latest.unpublished);
        ranks.into_iter().filter_map(|rank| Some((rank, *latest.reports.get(&rank)?))).collect()
    }
}
