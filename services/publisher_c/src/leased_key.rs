//! Keeps the worker's registration in etcd under a lease.

use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::Client;
use tokio::sync::watch;

use crate::backoff::Backoff;
use crate::config::Config;
use crate::error::Error;
use crate::log::Log;
use crate::registration::{
    EtcdError, connect, get, join_component, keep_incarnation, key_taken, put_unchanged, read_descriptor,
    recorded_incarnation, registered_incarnation,
};

const TRIES: u32 = 16;
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A key that exists for as long as this process lives.
///
/// `run` writes the key under a lease and renews it. It writes the key again if the lease expired, etcd lost its data,
/// or somebody deleted or replaced the key. Of two workers with one id the higher incarnation owns the key; at equal
/// ones the last to register. Descriptor and incarnation record, which have no lease, are checked at each renewal.
pub struct LeasedKey {
    pub config: Arc<Config>,
    pub incarnation: u64,
    /// The value to write; None to delete the key and end.
    pub desired: watch::Receiver<Option<Vec<u8>>>,
    /// The value that is in etcd, as far as is known.
    pub written: watch::Sender<Option<Vec<u8>>>,
    pub log: Arc<Log>,
}

#[derive(Default)]
struct Lease {
    id: i64,
    /// Earlier leases that seemed lost may exist until they expire; the key under them is still this process's.
    former: Vec<i64>,
    expires: Option<Instant>,
    owned: bool,
}

impl LeasedKey {
    /// Keeps the key until the desired value is None.
    ///
    /// Returns an error if another process registered the same worker, or the worker does not match its component.
    pub async fn run(mut self) -> Result<(), Error> {
        let mut lease = Lease::default();
        let mut failures = 0;
        let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let kept = match connect(&self.config).await {
                Ok(mut client) => self.keep(&mut client, &mut lease, &mut failures).await,
                Err(error) => Err(error),
            };
            match kept {
                Ok(()) => return Ok(()),
                Err(EtcdError::Fatal(error)) => {
                    self.written.send_replace(None);
                    return Err(error);
                }
                Err(EtcdError::Away(reason)) => {
                    if failures == 0 {
                        let endpoints = self.config.etcd.endpoints.join(",");
                        self.log.warning("etcd.unreachable", format_args!("endpoints={endpoints} error={reason}"));
                        backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
                    }
                    failures += 1;
                    if lease.expires.is_none_or(|expires| expires <= Instant::now()) {
                        self.written.send_replace(None);
                    }
                    if self.desired.borrow().is_none() {
                        return Ok(()); // the lease expires by itself
                    }
                    backoff.pause().await;
                }
            }
        }
    }

    async fn keep(&mut self, client: &mut Client, lease: &mut Lease, failures: &mut u32) -> Result<(), EtcdError> {
        loop {
            let Some(value) = self.desired.borrow_and_update().clone() else {
                self.written.send_replace(None);
                if lease.id != 0 {
                    client.lease_revoke(lease.id).await?;
                }
                return Ok(());
            };
            let is_new = self.renew(client, lease).await?;
            self.put_own(client, lease, &value).await?;
            if is_new {
                self.log.info("registration.written", format_args!("lease={:x}", lease.id));
            }
            self.check_companions(client, is_new).await?;
            self.written.send_replace(Some(value));
            if *failures > 0 {
                self.log.info("etcd.reachable", format_args!("failures={failures}"));
                *failures = 0;
            }
            // Two renewals may fail before the lease expires.
            let pause = Duration::from_secs(u64::from(self.config.lease_ttl_seconds)) / 3;
            let _ = tokio::time::timeout(pause, self.desired.changed()).await;
        }
    }

    /// Renews the lease, or makes a new one. Returns whether it is new.
    async fn renew(&self, client: &mut Client, lease: &mut Lease) -> Result<bool, EtcdError> {
        let asked = Instant::now();
        let ttl = self.config.lease_ttl_seconds;
        if lease.id != 0 {
            match client.lease_keep_alive(lease.id).await {
                Ok(_) => {
                    lease.expires = Some(asked + Duration::from_secs(u64::from(ttl)));
                    return Ok(false);
                }
                Err(etcd_client::Error::LeaseKeepAliveError(_)) => {
                    self.log.warning("etcd.lease_expired", format_args!("lease={:x}", lease.id));
                    lease.id = 0;
                    self.written.send_replace(None);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let granted = client.lease_grant(i64::from(ttl), None).await?;
        lease.id = granted.id();
        lease.former.push(lease.id);
        lease.expires = Some(asked + Duration::from_secs(granted.ttl().max(0) as u64));
        Ok(true)
    }

    async fn put_own(&self, client: &mut Client, lease: &mut Lease, value: &[u8]) -> Result<(), EtcdError> {
        let key = self.config.component.worker_key(self.config.worker_id);
        for _ in 0..TRIES {
            let found = get(client, &key).await?;
            if let Some(entry) = &found {
                if entry.lease == lease.id && entry.value == value {
                    lease.owned = true;
                    return Ok(());
                }
                // A key without a lease was written by hand: no process maintains it, so it may be replaced.
                let is_theirs = entry.lease != 0 && !lease.former.contains(&entry.lease);
                let theirs = registered_incarnation(&entry.value);
                if is_theirs && (theirs > self.incarnation || theirs == self.incarnation && lease.owned) {
                    return Err(EtcdError::Fatal(key_taken(&key)));
                }
            }
            // Compares the revision, so that a process that registers at the same moment is noticed.
            let revision = found.map_or(0, |entry| entry.mod_revision);
            if put_unchanged(client, &key, revision, value.to_vec(), lease.id).await? {
                lease.owned = true;
                return Ok(());
            }
        }
        Err(EtcdError::Fatal(key_taken(&key)))
    }

    /// Restores descriptor and incarnation record if etcd lost them.
    async fn check_companions(&self, client: &mut Client, is_new: bool) -> Result<(), EtcdError> {
        let config = &self.config;
        let descriptor = get(client, &config.component.descriptor_key()).await?;
        let record = get(client, &config.component.incarnation_key(config.worker_id)).await?;
        let has_descriptor = descriptor.is_some_and(|entry| read_descriptor(&entry.value, config).is_some());
        let has_record = record.is_some_and(|entry| recorded_incarnation(&entry.value) == self.incarnation);
        if is_new || !has_descriptor || !has_record {
            join_component(client, config).await?;
            keep_incarnation(client, config, self.incarnation).await?;
        }
        Ok(())
    }
}
