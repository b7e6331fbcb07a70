//! The configuration of a worker, and the registry entries that follow from it.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use crate::contract::{
    Component, ComponentDescriptor, CopyCounting, RankRegistration, Role, Transport, WorkerRegistration,
};
use crate::error::{Error, Status};
use crate::names::ComponentName;
use crate::security::access::{EtcdAccess, NatsAccess, TlsOptions};

/// Identifier of the hash algorithm and seed of local hashes; the only scheme so far.
pub const HASH_SCHEME: &str = "xxh3-1337";

/// Configuration of a worker. The header documents the fields and their defaults.
#[derive(Clone, Debug)]
pub struct Config {
    pub component: ComponentName,
    pub model: String,
    pub block_size: u32,
    pub worker_id: u64,
    /// Rank → KV blocks in its device memory, None if unknown.
    pub ranks: BTreeMap<u32, Option<u64>>,
    pub etcd: EtcdAccess,
    pub nats: NatsAccess,
    pub tls: TlsOptions,
    pub bind: String,
    pub advertise: String,
    pub transport: Transport,
    pub counting: CopyCounting,
    pub role: Role,
    pub labels: HashMap<String, String>,
    pub lora_names: Vec<String>,
    pub max_batched_tokens: Option<u32>,
    pub max_sequences: Option<u32>,
    pub max_model_len: u32,
    pub heartbeat: Duration,
    pub load_report: Duration,
    pub lease_ttl_seconds: u32,
    pub drain: Duration,
    pub flush: Duration,
    pub buffer_events: usize,
    pub buffer_bytes: usize,
    pub serves_requests: bool,
}

impl Config {
    /// Checks what types do not say.
    pub fn check(&self) -> Result<(), Error> {
        let refuse = |message: String| Err(Error::new(Status::InvalidArgument, message));
        if self.model.is_empty() {
            return refuse("model is empty: set the name of the model that clients send".into());
        }
        if !(1..=1 << 20).contains(&self.block_size) {
            return refuse(format!("block_size is {}: expected 1 to {}", self.block_size, 1 << 20));
        }
        if !(2..=86_400).contains(&self.lease_ttl_seconds) {
            return refuse(format!("lease_ttl_seconds is {}: expected 2 to 86400", self.lease_ttl_seconds));
        }
        if self.buffer_bytes < 512 << 10 {
            return refuse(format!("buffer_bytes is {}: expected {} or more", self.buffer_bytes, 512 << 10));
        }
        let (host, port) = self.bind.rsplit_once(':').unwrap_or_default();
        if host.is_empty() || port.parse::<u16>().is_err() {
            return refuse(format!("bind: expected host:port, received {:?}", self.bind));
        }
        if self.advertise.is_empty() && ["0.0.0.0", "[::]"].contains(&host) {
            let bind = &self.bind;
            return refuse(format!("bind: {bind:?} is a wildcard: set advertise to an address that others can reach"));
        }
        self.tls.check()?;
        self.etcd.check()?;
        self.nats.check()
    }

    /// Returns the address under which others reach the WorkerService that listens on `port`.
    pub fn endpoint(&self, port: u16) -> String {
        let has_port = self.advertise.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        if has_port {
            return self.advertise.clone();
        }
        let host = self.bind.rsplit_once(':').map_or("", |(host, _)| host);
        format!("{}:{port}", if self.advertise.is_empty() { host } else { &self.advertise })
    }

    fn component_message(&self) -> Component {
        Component { namespace: self.component.namespace.clone(), name: self.component.name.clone() }
    }

    /// Returns the descriptor that this worker writes if it is the first of its component.
    pub fn descriptor(&self) -> ComponentDescriptor {
        let transport = if self.transport == Transport::Unspecified { Transport::Durable } else { self.transport };
        ComponentDescriptor {
            component: Some(self.component_message()),
            model: self.model.clone(),
            block_size: self.block_size,
            hash_scheme: HASH_SCHEME.into(),
            default_transport: transport.into(),
            role: self.role.into(),
            max_model_len: Some(self.max_model_len).filter(|tokens| *tokens > 0),
            ..Default::default()
        }
    }

    /// Returns the worker's registration, with the same incarnation for all ranks.
    pub fn registration(&self, incarnation: u64, transport: Transport, endpoint: &str) -> WorkerRegistration {
        let rank = |(dp_rank, total_blocks): (&u32, &Option<u64>)| RankRegistration {
            dp_rank: *dp_rank,
            incarnation,
            total_blocks: *total_blocks,
            events_lost: false,
        };
        WorkerRegistration {
            worker_id: self.worker_id,
            component: Some(self.component_message()),
            model: self.model.clone(),
            endpoint: endpoint.into(),
            block_size: self.block_size,
            role: self.role.into(),
            transport: transport.into(),
            copy_counting: self.counting.into(),
            ranks: self.ranks.iter().map(rank).collect(),
            labels: self.labels.clone(),
            lora_names: self.lora_names.clone(),
            hash_scheme: HASH_SCHEME.into(),
            publishes_events: true,
            max_batched_tokens: self.max_batched_tokens,
            max_sequences: self.max_sequences,
            max_model_len: Some(self.max_model_len).filter(|tokens| *tokens > 0),
            registered_unix_ns: unix_ns(),
            draining: false,
            heartbeat_ms: Some(self.heartbeat.as_millis().clamp(1, u128::from(u32::MAX)) as u32),
            serves_call_stream: false,
            ..Default::default()
        }
    }
}

/// Returns the wall clock, nanoseconds since 1970.
pub fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos().min(u128::from(u64::MAX)) as u64)
}
