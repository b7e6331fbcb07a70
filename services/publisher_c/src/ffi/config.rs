//! Reads a configuration of the header.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::time::Duration;

use super::pointers::{list, required_text, text};
use super::types::{self, HEADER_VERSION};
use crate::config::Config;
use crate::contract::{CopyCounting, Role, Transport};
use crate::error::{Error, Status};
use crate::log::Log;
use crate::names::ComponentName;
use crate::security::access::{EtcdAccess, NatsAccess, TlsOptions};

/// Returns the configuration with defaults filled in.
///
/// # Safety
/// All pointers in it are null or valid.
pub unsafe fn read(given: &types::Config) -> Result<Config, Error> {
    if given.header_version != HEADER_VERSION {
        return Err(Error::new(
            Status::InvalidArgument,
            format!(
                "header_version: expected {HEADER_VERSION}, received {}: begin with kvr_config_init(), and compile the \
                 program with the header of this library",
                given.header_version
            ),
        ));
    }
    let string = |pointer, name, default: &str| -> Result<String, Error> {
        Ok(unsafe { text(pointer, name) }?.filter(|text| !text.is_empty()).unwrap_or(default).to_owned())
    };
    let set = |pointer, name| string(pointer, name, "");
    let names =
        |text: String| text.split(',').map(|each| each.trim().to_owned()).filter(|each| !each.is_empty()).collect();
    let mut ranks = BTreeMap::new();
    for rank in unsafe { list(given.ranks, given.rank_count, "ranks") }? {
        if ranks.insert(rank.dp_rank, above_zero(rank.total_blocks)).is_some() {
            let message = format!("ranks: expected each rank once, received {} twice", rank.dp_rank);
            return Err(Error::new(Status::InvalidArgument, message));
        }
    }
    if ranks.is_empty() {
        ranks.insert(0, None);
    }
    let labels = unsafe { list(given.labels, given.label_count, "labels") }?
        .iter()
        .map(|label| unsafe {
            Ok((required_text(label.key, "labels")?.into(), required_text(label.value, "labels")?.into()))
        })
        .collect::<Result<_, Error>>()?;
    let lora_names = unsafe { list(given.lora_names, given.lora_count, "lora_names") }?
        .iter()
        .map(|name| Ok(unsafe { required_text(*name, "lora_names") }?.into()))
        .collect::<Result<_, Error>>()?;
    let tls = TlsOptions {
        cert_file: set(given.tls_cert_file, "tls_cert_file")?,
        key_file: set(given.tls_key_file, "tls_key_file")?,
        ca_file: set(given.tls_ca_file, "tls_ca_file")?,
        client_auth: given.tls_client_auth != 0,
        peer_domain: set(given.tls_peer_domain, "tls_peer_domain")?,
    };
    let etcd = EtcdAccess {
        endpoints: names(string(given.etcd, "etcd", "127.0.0.1:2379")?),
        ca_file: string(given.etcd_ca_file, "etcd_ca_file", &tls.ca_file)?,
        user: set(given.etcd_user, "etcd_user")?,
        password_file: set(given.etcd_password_file, "etcd_password_file")?,
    };
    let nats = NatsAccess {
        urls: names(string(given.nats, "nats", "nats://127.0.0.1:4222")?),
        ca_file: string(given.nats_ca_file, "nats_ca_file", &tls.ca_file)?,
        user: set(given.nats_user, "nats_user")?,
        password_file: set(given.nats_password_file, "nats_password_file")?,
        token_file: set(given.nats_token_file, "nats_token_file")?,
        nkey_file: set(given.nats_nkey_file, "nats_nkey_file")?,
        credentials_file: set(given.nats_credentials_file, "nats_credentials_file")?,
        inbox_prefix: set(given.nats_inbox_prefix, "nats_inbox_prefix")?,
    };
    Ok(Config {
        component: ComponentName::parse(unsafe { required_text(given.component, "component") }?)?,
        model: string(given.model, "model", "")?,
        block_size: given.block_size,
        worker_id: if given.worker_id == 0 { random_id()? } else { given.worker_id },
        ranks,
        etcd,
        nats,
        tls,
        bind: string(given.bind, "bind", "127.0.0.1:0")?,
        advertise: string(given.advertise, "advertise", "")?,
        transport: known(given.transport, Transport::try_from(given.transport), "transport")?,
        counting: match known(given.copy_counting, CopyCounting::try_from(given.copy_counting), "copy_counting")? {
            CopyCounting::Set => CopyCounting::Set,
            _ => CopyCounting::Counted,
        },
        role: match known(given.role, Role::try_from(given.role), "role")? {
            Role::Unspecified => Role::Both,
            role => role,
        },
        labels,
        lora_names,
        max_batched_tokens: above_zero(given.max_batched_tokens),
        max_sequences: above_zero(given.max_sequences),
        max_model_len: given.max_model_len,
        heartbeat: milliseconds(given.heartbeat_ms, 5_000),
        load_report: milliseconds(given.load_report_ms, 1_000),
        lease_ttl_seconds: if given.lease_ttl_seconds == 0 { 10 } else { given.lease_ttl_seconds },
        drain: milliseconds(given.drain_ms, 30_000),
        flush: milliseconds(given.flush_ms, 5_000),
        buffer_events: size(given.buffer_events, 200_000),
        buffer_bytes: size(given.buffer_bytes, 32 << 20),
        serves_requests: given.serves_requests != 0,
    })
}

/// A pointer of the engine's, which only its own function uses.
struct LogContext(*mut c_void);

// The header says that the function is called from threads of the library.
unsafe impl Send for LogContext {}
unsafe impl Sync for LogContext {}

/// Returns where log events go.
///
/// # Safety
/// The function may be called from any thread until the worker is closed.
pub unsafe fn read_log(given: &types::Config) -> Log {
    let Some(function) = given.log else { return Log::to_stderr() };
    let context = LogContext(given.log_context);
    Log::new(move |level, event, details| {
        let context = &context;
        let (Ok(event), Ok(details)) = (CString::new(event), CString::new(details.replace('\0', " "))) else { return };
        unsafe { function(context.0, level as i32, event.as_ptr(), details.as_ptr()) };
    })
}

fn known<T, E>(value: i32, parsed: Result<T, E>, name: &str) -> Result<T, Error> {
    parsed.map_err(|_| {
        Error::new(Status::InvalidArgument, format!("{name}: expected a value of the header, received {value}"))
    })
}

/// Returns a number that is 0 while the engine does not know it.
pub fn above_zero<T: Default + PartialEq>(value: T) -> Option<T> {
    (value != T::default()).then_some(value)
}

fn milliseconds(value: u32, default: u32) -> Duration {
    Duration::from_millis(u64::from(if value == 0 { default } else { value }))
}

fn size(value: u64, default: usize) -> usize {
    if value == 0 { default } else { usize::try_from(value).unwrap_or(usize::MAX) }
}

/// Returns a random number of 53 bits, which JSON numbers can represent.
fn random_id() -> Result<u64, Error> {
    let number =
        getrandom::u64().map_err(|error| Error::new(Status::Internal, format!("no random number: {error}")))?;
    Ok(number >> 11 | 1)
}
