//! Admits calls of processes whose role has business with a method, by their certificates.

use std::collections::HashSet;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio_rustls::rustls::pki_types::CertificateDer;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use webpki::EndEntityCert;

use super::access::TlsOptions;
use super::listener::Refused;
use crate::log::Log;

/// Role that may call every method.
const ADMIN: &str = "admin";
/// Number of distinct callers whose refusal is logged.
const LOGGED: usize = 64;

/// Returns the roles that may call a method of the WorkerService. One that is not listed is for administrators only.
fn roles_of(method: &str) -> &'static [&'static str] {
    match method {
        "Generate" | "Abort" | "GetModelFile" => &["frontend"],
        "GetLoad" => &["frontend", "scheduler"],
        "GetRankState" | "GetEvents" => &["indexer"],
        _ => &[],
    }
}

/// Refuses calls whose certificate contains none of the method's roles.
#[derive(Clone)]
pub struct CallerCheck {
    /// Whether callers show certificates, and these name roles.
    applies: bool,
    domain: Arc<str>,
    logged: Arc<Mutex<HashSet<String>>>,
    refused: Arc<Refused>,
    log: Arc<Log>,
}

impl CallerCheck {
    pub fn new(options: &TlsOptions, refused: Arc<Refused>, log: Arc<Log>) -> Self {
        Self {
            applies: options.client_auth && !options.peer_domain.is_empty(),
            domain: options.peer_domain.as_str().into(),
            logged: Arc::default(),
            refused,
            log,
        }
    }

    /// Returns a service that admits the calls of another one before it reads them.
    pub fn guarding<S>(self, service: S) -> Guarded<S> {
        Guarded { service, check: self }
    }

    fn admit<B>(&self, request: &http::Request<B>) -> Result<(), Status> {
        if !self.applies {
            return Ok(());
        }
        let shown = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>().and_then(TlsConnectInfo::peer_certs);
        let names = shown.as_deref().and_then(|chain| chain.first()).map(names_of).unwrap_or_default();
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let roles = roles_of(method);
        let is_one = |name: &String| {
            let role = name.strip_suffix(&*self.domain).and_then(|head| head.strip_suffix('.'));
            role.is_some_and(|role| role == ADMIN || roles.contains(&role))
        };
        if names.iter().any(is_one) {
            return Ok(());
        }
        self.note(&names, method);
        let (expected, domain) = ([roles, &[ADMIN]].concat().join(" or "), &self.domain);
        Err(Status::permission_denied(format!("expected a certificate for {expected} in {domain}, to call {method}")))
    }

    fn note(&self, names: &[String], method: &str) {
        self.refused.count();
        let caller = names.join(", ");
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.len() < LOGGED && logged.insert(caller.clone()) {
            self.log.warning("caller.refused", format_args!("certificate={caller:?} method={method:?}"));
        }
    }
}

/// A service whose callers are checked.
#[derive(Clone)]
pub struct Guarded<S> {
    service: S,
    check: CallerCheck,
}

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        match self.check.admit(&request) {
            Ok(()) => Box::pin(self.service.call(request)),
            Err(refused) => Box::pin(std::future::ready(Ok(refused.into_http()))),
        }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(parsed) = EndEntityCert::try_from(certificate) else { return Vec::new() };
    parsed.valid_dns_names().map(str::to_owned).collect()
}
