//! The certificate files of a worker: checked when they are read, and followed when they change.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};
use webpki::{EndEntityCert, KeyUsage};

use super::access::TlsOptions;
use super::secret_files::read_secret;
use crate::error::{Error, Status};
use crate::log::Log;

/// Minimum interval between two looks at the files.
const CHECK: Duration = Duration::from_secs(1);

/// Returns the authorities of a file.
pub fn read_authorities(path: &str) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in read_certificates(path)? {
        roots.add(certificate).map_err(|error| unusable(path, &format!("certificates of authorities: {error}")))?;
    }
    Ok(roots)
}

fn read_certificates(path: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let content = fs::read(path).map_err(|error| unusable(path, &format!("a file that can be read: {error}")))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&content).collect();
    let found = found.map_err(|error| unusable(path, &format!("certificates, PEM: {error}")))?;
    if found.is_empty() { Err(unusable(path, "certificates, PEM")) } else { Ok(found) }
}

fn unusable(path: &str, expected: &str) -> Error {
    Error::new(Status::InvalidArgument, format!("{path}: expected {expected}"))
}

/// Returns the settings of a server with the files' content. The certificate must be valid now and belong to the key.
pub fn server_config(options: &TlsOptions) -> Result<ServerConfig, Error> {
    let TlsOptions { cert_file, key_file, ca_file, client_auth, .. } = options;
    let chain = read_certificates(cert_file)?;
    let key = PrivateKeyDer::from_pem_slice(&read_secret(key_file)?)
        .map_err(|error| unusable(key_file, &format!("an unencrypted private key, PEM: {error}")))?;
    check_time(cert_file, &chain)?;
    let provider = Arc::new(ring::default_provider());
    let internal = |error: &dyn std::fmt::Display| Error::new(Status::Internal, error.to_string());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| internal(&error))?;
    let builder = if *client_auth {
        let roots = Arc::new(read_authorities(ca_file)?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
        builder.with_client_cert_verifier(verifier.map_err(|error| internal(&error))?)
    } else {
        builder.with_no_client_auth()
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| {
        unusable(&format!("{cert_file}, {key_file}"), &format!("a certificate and its private key: {error}"))
    })?;
    config.alpn_protocols = vec![b"h2".into()];
    Ok(config)
}

/// Refuses a certificate that is expired or not yet valid.
fn check_time(path: &str, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
    let Some(own) = chain.first() else { return Ok(()) };
    let certificate =
        EndEntityCert::try_from(own).map_err(|error| unusable(path, &format!("a certificate, X.509: {error}")))?;
    let now = UnixTime::now();
    // Without authorities the check always fails, and for its time first.
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    match certificate.verify_for_usage(algorithms, &[], &[], now, KeyUsage::server_auth(), None, None) {
        Err(error @ (webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. })) => {
            Err(unusable(path, &format!("a certificate that is valid now: {error}")))
        }
        _ => Ok(()),
    }
}

/// The certificates of the worker's server, which follow their files.
///
/// Changed files that cannot be used are logged, and the previous content stays in use.
pub struct ServerCertificates {
    options: TlsOptions,
    used: Mutex<Used>,
    log: Arc<Log>,
}

struct Used {
    acceptor: TlsAcceptor,
    state: FileStates,
    /// Why the newest content was refused; empty if it is used.
    refused: String,
    checked: Instant,
}

/// What tells a changed file: also of a symbolic link, as Kubernetes replaces it.
type FileStates = Vec<Option<(u64, u64, i64, i64, u32)>>;

impl ServerCertificates {
    /// Reads the files.
    pub fn read(options: TlsOptions, log: Arc<Log>) -> Result<Self, Error> {
        let state = look(&options);
        let acceptor = TlsAcceptor::from(Arc::new(server_config(&options)?));
        let used = Used { acceptor, state, refused: String::new(), checked: Instant::now() };
        Ok(Self { options, used: Mutex::new(used), log })
    }

    /// Returns what to use for a new connection.
    pub fn newest(&self) -> TlsAcceptor {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        if used.checked.elapsed() >= CHECK {
            used.checked = Instant::now();
            let state = look(&self.options);
            // Files that were refused are tried again: they may have been read between two writes.
            if state != used.state || !used.refused.is_empty() {
                self.reload(&mut used, state);
            }
        }
        used.acceptor.clone()
    }

    fn reload(&self, used: &mut Used, state: FileStates) {
        used.state = state;
        match server_config(&self.options) {
            Ok(config) => {
                used.acceptor = TlsAcceptor::from(Arc::new(config));
                used.refused.clear();
                self.log.info("tls.reloaded", format_args!("certificate={}", self.options.cert_file));
            }
            Err(error) => {
                if error.message != used.refused {
                    self.log
                        .error("tls.reload_refused", format_args!("cause={error} uses=\"the previous certificate\""));
                }
                used.refused = error.message;
            }
        }
    }
}

fn look(options: &TlsOptions) -> FileStates {
    [&options.cert_file, &options.key_file, &options.ca_file]
        .iter()
        .filter(|path| !path.is_empty())
        .map(|path| {
            let found = fs::metadata(path).ok()?;
            Some((found.ino(), found.size(), found.mtime(), found.mtime_nsec(), found.mode()))
        })
        .collect()
}
