//! Admits calls of processes whose role has business with a worker, by their certificates.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_rustls::rustls::pki_types::CertificateDer;
use tonic::service::Interceptor;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::{Request, Status};
use webpki::EndEntityCert;

use super::access::TlsOptions;
use super::listener::Refused;
use crate::log::Log;

/// Roles that call others. A worker calls nobody.
const CALLERS: [&str; 4] = ["frontend", "scheduler", "indexer", "admin"];
/// Number of distinct callers whose refusal is logged.
const LOGGED: usize = 64;

/// Refuses calls whose certificate contains none of the roles in `CALLERS`.
#[derive(Clone)]
pub struct CallerCheck {
    /// Empty if certificates name no roles, or callers need none.
    admitted: Arc<Vec<String>>,
    domain: String,
    logged: Arc<Mutex<HashSet<String>>>,
    refused: Arc<Refused>,
    log: Arc<Log>,
}

impl CallerCheck {
    pub fn new(options: &TlsOptions, refused: Arc<Refused>, log: Arc<Log>) -> Self {
        let applies = options.client_auth && !options.peer_domain.is_empty();
        let names = CALLERS.iter().filter(|_| applies).map(|role| format!("{role}.{}", options.peer_domain));
        Self {
            admitted: Arc::new(names.collect()),
            domain: options.peer_domain.clone(),
            logged: Arc::default(),
            refused,
            log,
        }
    }

    fn note(&self, names: &[String]) {
        self.refused.count();
        let caller = names.join(", ");
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() < LOGGED && logged.insert(caller.clone()) {
            self.log.warning("caller.refused", format_args!("certificate={caller:?}"));
        }
    }
}

impl Interceptor for CallerCheck {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        if self.admitted.is_empty() {
            return Ok(request);
        }
        let shown = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
        let names = shown.as_deref().and_then(|chain| chain.first()).map(names_of).unwrap_or_default();
        if names.iter().any(|name| self.admitted.contains(name)) {
            return Ok(request);
        }
        self.note(&names);
        let (roles, domain) = (CALLERS.join(", "), &self.domain);
        Err(Status::permission_denied(format!("expected a certificate for one of {roles} in {domain}")))
    }
}

fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    parsed.valid_dns_names().map(str::to_owned).collect()
}
