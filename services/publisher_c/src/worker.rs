//! A registered worker: its tasks, and how they start and stop.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use prost::Message;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::{oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tonic::transport::server::TcpIncoming;
use tonic_health::server::HealthReporter;

use crate::backoff::Backoff;
use crate::config::Config;
use crate::contract::worker_service_server::WorkerServiceServer;
use crate::contract::{LoadReport, Rank as RankName, Transport as Kind, WorkerRegistration};
use crate::error::{Error, Status};
use crate::leased_key::LeasedKey;
use crate::loads::Loads;
use crate::log::Log;
use crate::rank::Rank;
use crate::registration::{EtcdError, begin_incarnation, connect, join_component};
use crate::requests::Requests;
use crate::security::callers::CallerCheck;
use crate::security::certificates::ServerCertificates;
use crate::security::listener::{Refused, encrypted};
use crate::sender::BatchSender;
use crate::server::Server;
use crate::threads;
use crate::transport::{self, Transport};

const MAX_MESSAGE_BYTES: usize = 64 << 20;
const KEEPALIVE: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
const DEREGISTER: Duration = Duration::from_secs(2);
const SHUTDOWN: Duration = Duration::from_secs(1);

/// A worker. Its methods may be called from any thread that does not belong to its runtime.
pub struct Worker {
    pub config: Arc<Config>,
    pub incarnation: u64,
    pub endpoint: String,
    pub ranks: BTreeMap<u32, Arc<Rank>>,
    pub requests: Arc<Requests>,
    /// Connections without a valid handshake, and calls of roles that have no business here.
    pub refused_connections: Arc<Refused>,
    pub refused_calls: Arc<Refused>,
    loads: Arc<Loads>,
    registration: Mutex<WorkerRegistration>,
    desired: watch::Sender<Option<Vec<u8>>>,
    written: watch::Receiver<Option<Vec<u8>>>,
    /// Why the worker ended by itself.
    failure: Arc<OnceLock<Error>>,
    stopping: AtomicBool,
    stopped: AtomicBool,
    /// Set until the worker is stopped.
    tasks: Mutex<Option<Tasks>>,
    runtime: Runtime,
    log: Arc<Log>,
}

struct Tasks {
    leasing: JoinHandle<()>,
    serving: JoinHandle<()>,
    end_serving: oneshot::Sender<()>,
    others: Vec<AbortHandle>,
    health: HealthReporter,
}

impl Worker {
    /// Registers a worker, and serves it. Waits for etcd until `timeout`, if there is one, but not for NATS.
    pub fn open(config: Config, timeout: Option<Duration>, log: Log) -> Result<Self, Error> {
        config.check()?;
        let runtime = threads::start()
            .map_err(|error| Error::new(Status::Internal, format!("no threads can be started: {error}")))?;
        let (config, log) = (Arc::new(config), Arc::new(log));
        let waits_for = Arc::new(Mutex::new(String::new()));
        // In the library's threads, because the calling one may have no signals blocked.
        let opening = runtime.spawn(Parts::open(config, log.clone(), waits_for.clone()));
        let opened = runtime.block_on(async {
            let ended = match timeout {
                Some(timeout) => tokio::time::timeout(timeout, opening).await.map_err(|_| {
                    let reason = waits_for.lock().unwrap_or_else(PoisonError::into_inner);
                    Error::new(Status::Timeout, format!("the worker could not be registered in time: {reason}"))
                })?,
                None => opening.await,
            };
            ended.unwrap_or_else(|error| Err(Error::new(Status::Internal, error.to_string())))
        });
        let parts = match opened {
            Ok(parts) => parts,
            Err(error) => {
                runtime.shutdown_timeout(SHUTDOWN);
                return Err(error);
            }
        };
        Ok(Self {
            config: parts.config,
            incarnation: parts.incarnation,
            endpoint: parts.endpoint,
            ranks: parts.ranks,
            requests: parts.requests,
            refused_connections: parts.refused_connections,
            refused_calls: parts.refused_calls,
            loads: parts.loads,
            registration: Mutex::new(parts.registration),
            desired: parts.desired,
            written: parts.written,
            failure: parts.failure,
            stopping: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            tasks: Mutex::new(Some(parts.tasks)),
            runtime,
            log,
        })
    }

    /// Returns an error if the worker ended or was stopped.
    pub fn check(&self) -> Result<(), Error> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::new(Status::Stopped, "the worker was stopped"));
        }
        Ok(())
    }

    /// Returns a rank of the worker.
    pub fn rank(&self, dp_rank: u32) -> Result<&Arc<Rank>, Error> {
        self.ranks.get(&dp_rank).ok_or_else(|| {
            let known: Vec<_> = self.ranks.keys().collect();
            let message = format!("expected one of this worker's ranks {known:?}, received {dp_rank}");
            Error::new(Status::InvalidArgument, message)
        })
    }

    /// Returns whether the registration is in etcd, as far as is known.
    pub fn registered(&self) -> bool {
        self.written.borrow().is_some()
    }

    /// Announces which ranks may lack blocks, because events of the engine were lost.
    pub fn announce_partial(&self) {
        self.register(|registration| {
            for rank in &mut registration.ranks {
                rank.events_lost = self.ranks.get(&rank.dp_rank).is_some_and(|rank| rank.is_partial());
            }
        });
    }

    /// Announces whether the worker takes requests. Events are published anyway.
    pub fn set_accepting(&self, accepting: bool) {
        let stopping = self.stopping.load(Ordering::Acquire);
        self.register(|registration| registration.draining = stopping || !accepting);
    }

    fn register(&self, change: impl FnOnce(&mut WorkerRegistration)) {
        let mut registration = self.registration.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut registration);
        self.desired.send_if_modified(|desired| match desired {
            Some(value) => {
                *value = registration.encode_to_vec();
                true
            }
            None => false, // the worker deregisters
        });
    }

    /// Reports the load of a rank.
    pub fn report_load(&self, dp_rank: u32, mut report: LoadReport) -> Result<(), Error> {
        self.rank(dp_rank)?;
        report.rank = Some(RankName { worker_id: self.config.worker_id, dp_rank });
        report.incarnation = self.incarnation;
        report.total_blocks = report.total_blocks.or(self.config.ranks.get(&dp_rank).copied().flatten());
        self.loads.report(dp_rank, report);
        Ok(())
    }

    /// Waits until all events recorded so far are sent.
    pub fn flush(&self, timeout: Option<Duration>) -> Result<(), Error> {
        self.runtime.block_on(async {
            match timeout {
                Some(timeout) => tokio::time::timeout(timeout, self.flushed()).await.map_err(|_| {
                    let unsent: u64 = self.ranks.values().map(|rank| rank.stats().unsent_events).sum();
                    Error::new(
                        Status::Timeout,
                        format!("NATS did not take all events in time; {unsent} wait behind them"),
                    )
                }),
                None => {
                    self.flushed().await;
                    Ok(())
                }
            }
        })
    }

    async fn flushed(&self) {
        for rank in self.ranks.values() {
            rank.flush().await;
        }
    }

    /// Refuses new requests, lets running ones finish, deregisters, sends unsent events, and stops serving.
    ///
    /// The engine must go on emitting meanwhile. A second call returns at once.
    pub fn stop(&self) {
        let Some(tasks) = self.tasks.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        self.stopping.store(true, Ordering::Release);
        self.runtime.block_on(async {
            self.requests.drain();
            self.register(|registration| registration.draining = true);
            let draining = self.desired.borrow().clone();
            tasks.health.set_not_serving::<WorkerServiceServer<Server>>().await;
            let mut written = self.written.clone();
            if self.failure.get().is_none() {
                let _ = tokio::time::timeout(DEREGISTER, written.wait_for(|value| *value == draining)).await;
                let _ = tokio::time::timeout(self.config.drain, self.requests.idle()).await;
            }
            self.requests.stop();
            self.desired.send_replace(None);
            let leasing = tasks.leasing.abort_handle();
            let _ = tokio::time::timeout(DEREGISTER, tasks.leasing).await;
            leasing.abort();
            if self.failure.get().is_none() {
                let _ = tokio::time::timeout(self.config.flush, self.flushed()).await;
            }
            let _ = tasks.end_serving.send(());
            let serving = tasks.serving.abort_handle();
            let _ = tokio::time::timeout(SHUTDOWN, tasks.serving).await;
            serving.abort();
            for task in tasks.others {
                task.abort();
            }
        });
        self.stopped.store(true, Ordering::Release);
        let unsent: u64 = self.ranks.values().map(|rank| rank.stats().unsent_events).sum();
        let worker_id = self.config.worker_id;
        self.log.info("worker.stopping", format_args!("worker_id={worker_id} unsent_events={unsent}"));
    }

    /// Stops the worker, if it was not stopped yet, and ends its threads.
    pub fn close(self) {
        self.stop();
        self.runtime.shutdown_timeout(SHUTDOWN);
    }
}

/// A worker before its runtime is part of it.
struct Parts {
    config: Arc<Config>,
    incarnation: u64,
    endpoint: String,
    ranks: BTreeMap<u32, Arc<Rank>>,
    requests: Arc<Requests>,
    refused_connections: Arc<Refused>,
    refused_calls: Arc<Refused>,
    loads: Arc<Loads>,
    registration: WorkerRegistration,
    desired: watch::Sender<Option<Vec<u8>>>,
    written: watch::Receiver<Option<Vec<u8>>>,
    failure: Arc<OnceLock<Error>>,
    tasks: Tasks,
}

impl Parts {
    async fn open(config: Arc<Config>, log: Arc<Log>, waits_for: Arc<Mutex<String>>) -> Result<Self, Error> {
        let (incarnation, kind) = settle(&config, &log, &waits_for).await?;
        let listener = TcpListener::bind(&config.bind).await.map_err(|error| {
            Error::new(Status::InvalidArgument, format!("bind: cannot listen on {}: {error}", config.bind))
        })?;
        let port = listener.local_addr().map_or(0, |address| address.port());
        let endpoint = config.endpoint(port);
        let ranks: BTreeMap<u32, Arc<Rank>> =
            config.ranks.keys().map(|dp_rank| (*dp_rank, Arc::new(new_rank(&config, *dp_rank, incarnation)))).collect();
        let (requests, loads) = (Arc::new(Requests::default()), Arc::new(Loads::default()));

        let (health, health_service) = tonic_health::server::health_reporter();
        health.set_serving::<WorkerServiceServer<Server>>().await;
        let service =
            Server { config: config.clone(), ranks: ranks.clone(), requests: requests.clone(), loads: loads.clone() };
        let service = WorkerServiceServer::new(service)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(usize::MAX);
        let (refused_connections, refused_calls) = (Arc::new(Refused::default()), Arc::new(Refused::default()));
        let service = CallerCheck::new(&config.tls, refused_calls.clone(), log.clone()).guarding(service);
        let (end_serving, end) = oneshot::channel();
        let router = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEPALIVE))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(health_service)
            .add_service(service);
        let end = async {
            let _ = end.await; // also if the worker is dropped
        };
        let serving: Pin<Box<dyn Future<Output = _> + Send>> = if config.tls.serves() {
            let certificates = ServerCertificates::read(config.tls.clone(), log.clone())?;
            let connections = encrypted(listener, certificates, refused_connections.clone(), log.clone());
            Box::pin(router.serve_with_incoming_shutdown(connections, end))
        } else {
            warn_if_exposed(&config.bind, &log);
            Box::pin(router.serve_with_incoming_shutdown(TcpIncoming::from(listener).with_nodelay(Some(true)), end))
        };
        let serving_log = log.clone();
        let serving = tokio::spawn(async move {
            if let Err(error) = serving.await {
                serving_log.error("worker.not_serving", format_args!("error={error}"));
            }
        });

        let name = format!("kvrouter-worker-{:016x}", config.worker_id);
        let client = transport::connect(&config.nats, &config.tls, name, log.clone()).await?;
        let transport = Transport::new(client, kind, &config.component, log.clone());
        let mut others =
            vec![tokio::spawn(report_loads(config.clone(), loads.clone(), transport.clone())).abort_handle()];
        for (dp_rank, rank) in &ranks {
            let messages = if kind == Kind::CoreNats { "live" } else { "events" };
            let sender = BatchSender {
                rank: rank.clone(),
                subject: config.component.subject(messages, config.worker_id, *dp_rank),
                transport: transport.clone(),
                heartbeat: config.heartbeat,
                log: log.clone(),
            };
            others.push(tokio::spawn(sender.run()).abort_handle());
        }

        let registration = config.registration(incarnation, kind, &endpoint);
        let (desired, desires) = watch::channel(Some(registration.encode_to_vec()));
        let (writes, written) = watch::channel(None);
        let key =
            LeasedKey { config: config.clone(), incarnation, desired: desires, written: writes, log: log.clone() };
        let failure = Arc::new(OnceLock::new());
        let leasing = tokio::spawn(lease(key, failure.clone(), requests.clone(), others.clone(), log.clone()));
        *waits_for.lock().unwrap_or_else(PoisonError::into_inner) = "etcd is away".into();
        let registered = written.clone().wait_for(Option::is_some).await.is_ok();
        if !registered {
            let ended = || Error::new(Status::Internal, "the registration ended");
            return Err(failure.get().cloned().unwrap_or_else(ended));
        }
        let (worker_id, component) = (config.worker_id, &config.component);
        let transport_name = kind.as_str_name();
        log.info(
            "worker.serving",
            format_args!(
                "worker_id={worker_id} component={component} endpoint={endpoint} incarnation={incarnation} \
                 transport={transport_name}"
            ),
        );
        let tasks = Tasks { leasing, serving, end_serving, others, health };
        Ok(Self {
            config,
            incarnation,
            endpoint,
            ranks,
            requests,
            refused_connections,
            refused_calls,
            loads,
            registration,
            desired,
            written,
            failure,
            tasks,
        })
    }
}

/// Warns if the worker listens without TLS on an address that other machines reach.
fn warn_if_exposed(bind: &str, log: &Log) {
    let host = bind.rsplit_once(':').map_or(bind, |(host, _)| host).trim_matches(['[', ']']);
    let is_loopback = host.parse::<IpAddr>().map_or(host == "localhost", |address| address.is_loopback());
    if !is_loopback {
        let advice = "everybody who reaches this port can read and change what passes: set tls_cert_file, \
                      tls_key_file and tls_client_auth, or bind to loopback";
        log.warning("listener.exposed", format_args!("address={bind} advice={advice:?}"));
    }
}

fn new_rank(config: &Config, dp_rank: u32, incarnation: u64) -> Rank {
    let head = kvrouter_core::publisher::BatchHead {
        worker_id: config.worker_id,
        dp_rank,
        incarnation,
        block_size: config.block_size,
        counting: config.counting.into(),
    };
    Rank::new(head, config.buffer_events, config.buffer_bytes)
}

/// Joins the component and begins an incarnation, as soon as etcd answers. Returns it and the transport.
async fn settle(config: &Config, log: &Log, waits_for: &Mutex<String>) -> Result<(u64, Kind), Error> {
    let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(3));
    let mut is_first = true;
    loop {
        let settled = async {
            let mut client = connect(config).await?;
            let descriptor = join_component(&mut client, config).await?;
            let kind = match (config.transport, descriptor.default_transport()) {
                (Kind::Unspecified, Kind::Unspecified) => Kind::Durable,
                (Kind::Unspecified, default) => default,
                (chosen, _) => chosen,
            };
            Ok((begin_incarnation(&mut client, config).await?, kind))
        };
        match settled.await {
            Ok(settled) => return Ok(settled),
            Err(EtcdError::Fatal(error)) => return Err(error),
            Err(EtcdError::Away(reason)) => {
                if std::mem::take(&mut is_first) {
                    let endpoints = config.etcd.endpoints.join(",");
                    log.warning("etcd.waiting", format_args!("endpoints={endpoints} error={reason}"));
                }
                *waits_for.lock().unwrap_or_else(PoisonError::into_inner) = reason;
                backoff.pause().await;
            }
        }
    }
}

/// Keeps the registration. If another process has the worker's identity, everything else ends.
async fn lease(
    key: LeasedKey,
    failure: Arc<OnceLock<Error>>,
    requests: Arc<Requests>,
    others: Vec<AbortHandle>,
    log: Arc<Log>,
) {
    if let Err(error) = key.run().await {
        log.error("worker.ended", format_args!("error={error}"));
        let _ = failure.set(error); // only this task sets it
        for task in others {
            task.abort();
        }
        requests.stop();
    }
}

/// Publishes new load reports, at most one of each rank per interval. Reports are lost while NATS is away.
async fn report_loads(config: Arc<Config>, loads: Arc<Loads>, transport: Transport) {
    loop {
        loads.changed.notified().await;
        for (dp_rank, report) in loads.take_unpublished() {
            let subject = config.component.subject("load", config.worker_id, dp_rank);
            let _ = transport.publish(&subject, report.encode_to_vec().into()).await;
        }
        tokio::time::sleep(config.load_report).await;
    }
}
