//! What a worker negotiates in etcd before it serves: the component's descriptor and its own incarnation.

use std::time::Duration;

use etcd_client::{Certificate, Client, Compare, CompareOp, ConnectOptions, Identity, TlsOptions, Txn, TxnOp};
use prost::Message;
use tonic::Code;

use crate::config::{Config, unix_ns};
use crate::contract::{ComponentDescriptor, IncarnationRecord, Role, WorkerRegistration};
use crate::error::{Error, Status};
use crate::security::secret_files::{read_secret, read_secret_line};

const CALL: Duration = Duration::from_secs(3);
/// Part of etcd's answer to a user that may not do something.
const FORBIDDEN: &str = "permission denied";
/// Nanoseconds since 1970, in the year 2262. No worker begins a higher incarnation, so a higher value is invalid.
const MAX_INCARNATION: u64 = 1 << 63;

/// Why a call to etcd failed.
pub enum EtcdError {
    /// Etcd is away: try again later.
    Away(String),
    /// Do not try again.
    Fatal(Error),
}

impl From<etcd_client::Error> for EtcdError {
    fn from(error: etcd_client::Error) -> Self {
        // The error of a handshake is behind the one of the transport.
        let mut text = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(next) = cause {
            text = format!("{text}: {next}");
            cause = next.source();
        }
        Self::Away(text)
    }
}

/// Connects to etcd with the newest content of the files. Calls time out after 3 s.
pub async fn connect(config: &Config) -> Result<Client, EtcdError> {
    let away = |error: Error| EtcdError::Away(error.message);
    let access = &config.etcd;
    let mut options = ConnectOptions::new()
        .with_timeout(CALL)
        .with_connect_timeout(CALL)
        .with_keep_alive(Duration::from_secs(10), Duration::from_secs(5))
        .with_keep_alive_while_idle(true);
    if access.is_encrypted() {
        options = options.with_tls(encryption(config).map_err(away)?);
    }
    if !access.user.is_empty() {
        let password = read_secret_line(&access.password_file).map_err(away)?;
        options = options.with_user(access.user.clone(), password).with_auto_token_refresh(true);
    }
    Client::connect(&access.endpoints, Some(options)).await.map_err(|error| match error {
        etcd_client::Error::GRpcStatus(status)
            if [Code::InvalidArgument, Code::FailedPrecondition].contains(&status.code()) =>
        {
            let (user, reason) = (&access.user, status.message());
            EtcdError::Away(format!("etcd refused user {user:?}: {reason}; check the user and its password file"))
        }
        error => error.into(),
    })
}

/// Returns the authorities of etcd, and the worker's own certificate.
fn encryption(config: &Config) -> Result<TlsOptions, Error> {
    let read = |path: &str| {
        std::fs::read(path).map_err(|error| Error::new(Status::InvalidArgument, format!("{path}: {error}")))
    };
    let mut options = TlsOptions::new();
    options = match config.etcd.ca_file.as_str() {
        "" => options.with_native_roots(),
        path => options.ca_certificate(Certificate::from_pem(read(path)?)),
    };
    if config.tls.serves() {
        let (chain, key) = (read(&config.tls.cert_file)?, read_secret(&config.tls.key_file)?);
        options = options.identity(Identity::from_pem(chain, key));
    }
    Ok(options)
}

/// A key's value, with the revision of its last change and its lease (0 for none).
pub struct Entry {
    pub value: Vec<u8>,
    pub mod_revision: i64,
    pub lease: i64,
}

/// Returns a key's entry; None if it is missing.
pub async fn get(client: &mut Client, key: &str) -> Result<Option<Entry>, EtcdError> {
    let mut response = client.get(key, None).await?;
    Ok(response.take_kvs().pop().map(|found| Entry {
        mod_revision: found.mod_revision(),
        lease: found.lease(),
        value: found.into_key_value().1,
    }))
}

/// Writes a key if it is unchanged since `revision` (0: if it is missing). Returns whether it was written.
pub async fn put_unchanged(
    client: &mut Client,
    key: &str,
    revision: i64,
    value: Vec<u8>,
    lease: i64,
) -> Result<bool, EtcdError> {
    let options = etcd_client::PutOptions::new().with_lease(lease);
    let transaction = Txn::new().when([Compare::mod_revision(key, CompareOp::Equal, revision)]).and_then([TxnOp::put(
        key,
        value,
        Some(options),
    )]);
    Ok(client.txn(transaction).await?.succeeded())
}

/// Returns the component's descriptor, and writes this worker's if there is none.
///
/// Where the worker's user may not write it, a Scheduler does so as soon as the worker is registered.
pub async fn join_component(client: &mut Client, config: &Config) -> Result<ComponentDescriptor, EtcdError> {
    let (key, desired) = (config.component.descriptor_key(), config.descriptor());
    loop {
        let found = get(client, &key).await?;
        let descriptor = found.as_ref().and_then(|entry| read_descriptor(&entry.value, config));
        match descriptor {
            Some(descriptor) => {
                check_match(config, &descriptor, &desired).map_err(EtcdError::Fatal)?;
                return Ok(descriptor);
            }
            // An entry that no reader accepts is replaced by the next worker to join.
            None => {
                let revision = found.map_or(0, |entry| entry.mod_revision);
                match put_unchanged(client, &key, revision, desired.encode_to_vec(), 0).await {
                    Err(EtcdError::Away(error)) if error.contains(FORBIDDEN) => return Ok(desired),
                    written => written?,
                };
            }
        }
    }
}

/// Decodes a descriptor; None if no reader accepts it.
pub fn read_descriptor(value: &[u8], config: &Config) -> Option<ComponentDescriptor> {
    let descriptor = ComponentDescriptor::decode(value).ok()?;
    let is_same = descriptor.component.as_ref().is_none_or(|component| {
        (&component.namespace, &component.name) == (&config.component.namespace, &config.component.name)
    });
    (is_same && descriptor.block_size > 0 && !descriptor.model.is_empty()).then_some(descriptor)
}

fn check_match(config: &Config, found: &ComponentDescriptor, desired: &ComponentDescriptor) -> Result<(), Error> {
    let mut differences = Vec::new();
    let mut compare = |field: &str, theirs: String, ours: String| {
        if theirs != ours {
            differences.push(format!("{field}: expected {theirs}, this worker has {ours}"));
        }
    };
    compare("model", found.model.clone(), desired.model.clone());
    compare("block_size", found.block_size.to_string(), desired.block_size.to_string());
    compare("hash_scheme", found.hash_scheme.clone(), desired.hash_scheme.clone());
    compare("max_model_len", found.max_model_len().to_string(), desired.max_model_len().to_string());
    let role = |descriptor: &ComponentDescriptor| match descriptor.role() {
        Role::Unspecified => Role::Both,
        role => role,
    };
    compare("role", role(found).as_str_name().into(), role(desired).as_str_name().into());
    if differences.is_empty() {
        return Ok(());
    }
    let component = &config.component;
    Err(Error::new(
        Status::DescriptorMismatch,
        format!(
            "this worker does not match component {component}: {}. Correct the worker, choose another component, or, if \
             no worker of the component runs any more, delete its descriptor with `kvrouter component forget {component}`",
            differences.join("; ")
        ),
    ))
}

/// Begins a new incarnation: the higher of the wall clock and the last incarnation plus one.
///
/// The last incarnation is the higher of the recorded and the registered one, since the record can be lost while the
/// registration remains.
pub async fn begin_incarnation(client: &mut Client, config: &Config) -> Result<u64, EtcdError> {
    let key = config.component.incarnation_key(config.worker_id);
    let worker_key = config.component.worker_key(config.worker_id);
    loop {
        let found = get(client, &key).await?;
        let last = found.as_ref().map_or(0, |entry| recorded_incarnation(&entry.value));
        let registered = get(client, &worker_key).await?.map_or(0, |entry| registered_incarnation(&entry.value));
        let incarnation = unix_ns().max(last + 1).max(registered + 1);
        let value = IncarnationRecord { incarnation }.encode_to_vec();
        if put_unchanged(client, &key, found.map_or(0, |entry| entry.mod_revision), value, 0).await? {
            return Ok(incarnation);
        }
    }
}

/// Restores the incarnation record if etcd lost it, or has an earlier or undecodable one.
pub async fn keep_incarnation(client: &mut Client, config: &Config, incarnation: u64) -> Result<(), EtcdError> {
    let key = config.component.incarnation_key(config.worker_id);
    let found = get(client, &key).await?;
    let recorded = found.as_ref().map_or(0, |entry| recorded_incarnation(&entry.value));
    if recorded > incarnation {
        return Err(EtcdError::Fatal(key_taken(&config.component.worker_key(config.worker_id))));
    }
    if recorded < incarnation {
        // If another incarnation is written at this moment, it stays, and the next renewal checks again.
        let value = IncarnationRecord { incarnation }.encode_to_vec();
        put_unchanged(client, &key, found.map_or(0, |entry| entry.mod_revision), value, 0).await?;
    }
    Ok(())
}

/// Returns a recorded incarnation; 0 if it cannot be decoded or is invalid.
pub fn recorded_incarnation(value: &[u8]) -> u64 {
    IncarnationRecord::decode(value).map_or(0, |record| record.incarnation % MAX_INCARNATION)
}

/// Returns the incarnation of an encoded registration; 0 if it cannot be decoded or is invalid.
pub fn registered_incarnation(value: &[u8]) -> u64 {
    let Ok(worker) = WorkerRegistration::decode(value) else { return 0 };
    worker.ranks.iter().map(|rank| rank.incarnation).filter(|each| *each < MAX_INCARNATION).max().unwrap_or(0)
}

/// Another process registered the same worker, so that two live processes have one identity.
pub fn key_taken(key: &str) -> Error {
    Error::new(Status::KeyTaken, format!("another process registered {key}: give each process an id of its own"))
}
