//! Sends encoded batches over JetStream or Core NATS.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream::context::{Context, ContextBuilder, CreateStreamErrorKind, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::stream::{Config as StreamConfig, DiscardPolicy, RetentionPolicy, StorageType};
use async_nats::{AuthError, Client, ConnectOptions, Event, ServerAddr, jetstream};
use bytes::Bytes;

use crate::contract::Transport as Kind;
use crate::error::{Error, Status};
use crate::log::Log;
use crate::names::ComponentName;
use crate::security::access::{NatsAccess, TlsOptions, without_users};
use crate::security::nats_login;

const ACK: Duration = Duration::from_secs(2);
const HEADERS_BYTES: usize = 1024;
/// Settings of the stream, as all publishers and Indexers create it.
const STREAM_MAX_BYTES: i64 = 1 << 30;
const STREAM_LEAST_BYTES: i64 = 16 << 20;
const STREAM_MAX_AGE: Duration = Duration::from_secs(3600);
const DUPLICATE_WINDOW: Duration = Duration::from_secs(120);
/// Error codes of JetStream.
const ANOTHER_CONFIG: u64 = 10058;
const STORAGE_SHORT: u64 = 10047;

/// Why a message was not accepted.
pub enum SendError {
    /// It may not have arrived: send it again with the same id.
    Away(String),
    /// The server will never accept it: do not send it again.
    Refused(String),
}

/// Connects to NATS, now or as soon as it can be reached, and again whenever the connection is lost.
pub async fn connect(access: &NatsAccess, tls: &TlsOptions, name: String, log: Arc<Log>) -> Result<Client, Error> {
    let urls = &access.urls;
    let invalid = |error: &dyn std::fmt::Display| {
        Error::new(
            Status::InvalidArgument,
            format!("nats: expected URLs such as nats://127.0.0.1:4222, received {}: {error}", without_users(urls)),
        )
    };
    let servers: Vec<ServerAddr> =
        urls.iter().map(|url| url.parse()).collect::<Result<_, _>>().map_err(|error| invalid(&error))?;
    let is_away = AtomicBool::new(false);
    identified(access, tls)
        .name(name)
        .retry_on_initial_connect()
        .max_reconnects(None)
        .ping_interval(Duration::from_secs(10))
        .reconnect_delay_callback(|attempts| Duration::from_millis((100 << attempts.min(4)).min(1000)))
        .event_callback(move |event| {
            match event {
                Event::Connected => {
                    is_away.store(false, Ordering::Relaxed);
                    log.info("nats.connected", format_args!(""));
                }
                Event::Disconnected => log.warning("nats.disconnected", format_args!("")),
                Event::ServerError(error) => log.warning("nats.error", format_args!("error={error}")),
                // One for each attempt to connect: the first one is logged.
                Event::ClientError(error) if !is_away.swap(true, Ordering::Relaxed) => {
                    let advice = "check its address, the authorities of its certificate, and the user of this worker";
                    log.warning("nats.unreachable", format_args!("error={error} advice={advice:?}"));
                }
                _ => {}
            }
            async {}
        })
        .connect(servers)
        .await
        .map_err(|error| invalid(&error))
}

/// Returns options with the worker's identity. All files are read again at each connection.
fn identified(access: &NatsAccess, tls: &TlsOptions) -> ConnectOptions {
    let mut options = if access.logs_in() {
        let access = access.clone();
        ConnectOptions::with_auth_callback(move |nonce| {
            let answer = nats_login::answer(&access, &nonce).map_err(AuthError::new);
            async { answer }
        })
    } else {
        ConnectOptions::new()
    };
    options = options.require_tls(access.is_encrypted());
    if !access.ca_file.is_empty() {
        options = options.add_root_certificates(access.ca_file.clone().into());
    }
    if tls.serves() {
        options = options.add_client_certificate(tls.cert_file.clone().into(), tls.key_file.clone().into());
    }
    if !access.inbox_prefix.is_empty() {
        options = options.custom_inbox_prefix(&access.inbox_prefix);
    }
    options
}

/// Sends one encoded batch at a time.
#[derive(Clone)]
pub struct Transport {
    client: Client,
    /// None for Core NATS.
    stream: Option<(Context, StreamConfig)>,
    log: Arc<Log>,
}

impl Transport {
    pub fn new(client: Client, kind: Kind, component: &ComponentName, log: Arc<Log>) -> Self {
        let stream = (kind != Kind::CoreNats).then(|| {
            let context = ContextBuilder::new().timeout(ACK).ack_timeout(ACK).build(client.clone());
            (context, stream_config(component))
        });
        Self { client, stream, log }
    }

    /// Returns how many bytes of events fit into one message by the server's limit.
    pub fn room_for_events(&self) -> usize {
        match self.client.max_payload() {
            0 => 1 << 20, // not connected yet
            bytes => bytes.saturating_sub(HEADERS_BYTES).max(1),
        }
    }

    /// Sends a batch; returns once the transport has accepted it. The stream drops a repeated `message_id`.
    pub async fn send(&self, subject: &str, payload: Bytes, message_id: Option<&str>) -> Result<(), SendError> {
        match &self.stream {
            Some((context, config)) if self.is_connected() => {
                self.store(context, config, subject, payload, message_id).await
            }
            Some(_) => Err(away()),
            None => self.publish(subject, payload).await,
        }
    }

    /// A message that is sent while there is no connection would be sent later, and twice if it is repeated.
    fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Publishes over Core NATS. A message is accepted once it was passed to the server; it may reach no consumer.
    pub async fn publish(&self, subject: &str, payload: Bytes) -> Result<(), SendError> {
        if !self.is_connected() {
            return Err(away());
        }
        if payload.len() > self.client.max_payload() {
            return Err(SendError::Refused(format!("the server accepts {} bytes", self.client.max_payload())));
        }
        let published = async {
            self.client.publish(subject.to_owned(), payload).await.map_err(|error| error.to_string())?;
            self.client.flush().await.map_err(|error| error.to_string())
        };
        match tokio::time::timeout(ACK, published).await {
            Ok(result) => result.map_err(SendError::Away),
            Err(_) => Err(SendError::Away("NATS did not take the message in time".into())),
        }
    }

    async fn store(
        &self,
        context: &Context,
        config: &StreamConfig,
        subject: &str,
        payload: Bytes,
        message_id: Option<&str>,
    ) -> Result<(), SendError> {
        let mut message = PublishMessage::build().payload(payload).expected_stream(&config.name);
        if let Some(message_id) = message_id {
            message = message.message_id(message_id);
        }
        let error = match context.send_publish(subject.to_owned(), message).await {
            Ok(acknowledged) => match acknowledged.await {
                Ok(_) => return Ok(()),
                Err(error) => error,
            },
            Err(error) => error,
        };
        match error.kind() {
            PublishErrorKind::StreamNotFound => {
                let created = self.ensure_stream(context, config).await;
                Err(SendError::Away(
                    created.err().unwrap_or_else(|| format!("no stream stored {subject}; it exists now")),
                ))
            }
            PublishErrorKind::MaxPayloadExceeded => Err(SendError::Refused(error.to_string())),
            _ if is_refusal(&error) => Err(SendError::Refused(error.to_string())),
            PublishErrorKind::TimedOut if self.is_connected() => {
                // The server says that there is no stream only if nobody else subscribes to the subject.
                let created = self.ensure_stream(context, config).await;
                Err(SendError::Away(created.err().unwrap_or_else(|| error.to_string())))
            }
            _ => Err(SendError::Away(error.to_string())),
        }
    }

    /// Creates the component's stream if it is missing. An existing stream keeps its limits.
    ///
    /// If the server cannot reserve the storage, the stream gets half, and so on down to 16 MiB.
    async fn ensure_stream(&self, context: &Context, config: &StreamConfig) -> Result<(), String> {
        let mut config = config.clone();
        loop {
            let Err(error) = context.get_or_create_stream(config.clone()).await else { break };
            let code = match error.kind() {
                CreateStreamErrorKind::JetStream(error) => error.error_code().0,
                _ => 0,
            };
            match code {
                // Another process created it meanwhile with other limits.
                ANOTHER_CONFIG => {}
                STORAGE_SHORT if config.max_bytes > STREAM_LEAST_BYTES => {
                    config.max_bytes = (config.max_bytes / 2).max(STREAM_LEAST_BYTES);
                }
                _ => {
                    return Err(format!(
                        "stream {} does not answer, and cannot be created ({error}); where a worker may not create it, \
                         an Indexer does so as soon as it knows the component",
                        config.name
                    ));
                }
            }
        }
        if config.max_bytes < STREAM_MAX_BYTES {
            self.log.warning("stream.reduced", format_args!("stream={} max_bytes={}", config.name, config.max_bytes));
        }
        Ok(())
    }
}

fn away() -> SendError {
    SendError::Away("NATS is away".into())
}

/// Returns whether the stream refused the message itself, which it would do again.
fn is_refusal(error: &jetstream::context::PublishError) -> bool {
    let source = std::error::Error::source(error);
    source.and_then(|source| source.downcast_ref::<jetstream::Error>()).is_some_and(|error| error.code() == 400)
}

fn stream_config(component: &ComponentName) -> StreamConfig {
    StreamConfig {
        name: component.stream(),
        subjects: vec![component.events_wildcard()],
        retention: RetentionPolicy::Limits,
        discard: DiscardPolicy::Old,
        storage: StorageType::File,
        max_age: STREAM_MAX_AGE,
        max_bytes: STREAM_MAX_BYTES,
        duplicate_window: DUPLICATE_WINDOW,
        allow_direct: true,
        ..Default::default()
    }
}
