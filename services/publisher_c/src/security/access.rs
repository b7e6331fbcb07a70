//! How a worker authenticates: the options of the header, checked. Files are read again at each connection.

use super::certificates;
use super::nats_login;
use super::secret_files::read_secret_line;
use crate::error::{Error, Status};
use async_nats::ServerAddr;

/// Files and rules of the worker's TLS. Empty strings are options that are not set.
#[derive(Clone, Debug, Default)]
pub struct TlsOptions {
    pub cert_file: String,
    pub key_file: String,
    pub ca_file: String,
    /// Whether callers must present a certificate of `ca_file`.
    pub client_auth: bool,
    /// Domain of the roles in certificates.
    pub peer_domain: String,
}

/// Endpoints and user of etcd.
#[derive(Clone, Debug)]
pub struct EtcdAccess {
    pub endpoints: Vec<String>,
    pub ca_file: String,
    pub user: String,
    pub password_file: String,
}

/// URLs and identity in NATS.
#[derive(Clone, Debug)]
pub struct NatsAccess {
    pub urls: Vec<String>,
    pub ca_file: String,
    pub user: String,
    pub password_file: String,
    pub token_file: String,
    pub nkey_file: String,
    pub credentials_file: String,
    pub inbox_prefix: String,
}

impl TlsOptions {
    /// Checks that the options fit together and that the files can be used.
    pub fn check(&self) -> Result<(), Error> {
        if self.cert_file.is_empty() != self.key_file.is_empty() {
            return refuse("tls_cert_file and tls_key_file belong together: set both or none");
        }
        if self.cert_file.is_empty() && self.client_auth {
            return refuse("tls_client_auth needs tls_ca_file, tls_cert_file and tls_key_file");
        }
        if self.cert_file.is_empty() && !self.ca_file.is_empty() {
            return refuse("tls_ca_file is set: a worker also needs tls_cert_file and tls_key_file");
        }
        if self.client_auth && self.ca_file.is_empty() {
            return refuse("tls_client_auth needs tls_ca_file");
        }
        if !self.peer_domain.is_empty() && self.cert_file.is_empty() {
            return refuse("tls_peer_domain needs tls_cert_file and tls_key_file");
        }
        if !self.ca_file.is_empty() {
            certificates::read_authorities(&self.ca_file)?;
        }
        if self.serves() { certificates::server_config(self).map(drop) } else { Ok(()) }
    }

    /// Returns whether the worker's server encrypts.
    pub fn serves(&self) -> bool {
        !self.cert_file.is_empty()
    }
}

impl EtcdAccess {
    /// Checks that the options fit together and that the files can be used.
    pub fn check(&self) -> Result<(), Error> {
        if self.user.is_empty() != self.password_file.is_empty() {
            return refuse("etcd_user and etcd_password_file belong together: set both or none");
        }
        if self.endpoints.iter().any(|each| each.contains('@')) {
            return refuse("etcd: an endpoint contains a user: use etcd_user and etcd_password_file");
        }
        if let Some(wrong) = self.endpoints.iter().find(|each| !is_endpoint(each)) {
            return refuse(&format!("etcd: expected host:port, received {wrong:?}"));
        }
        let https = self.endpoints.iter().filter(|each| each.starts_with("https://")).count();
        if https != 0 && https != self.endpoints.len() {
            return refuse("etcd: expected https:// before all endpoints or before none");
        }
        if !self.ca_file.is_empty() {
            certificates::read_authorities(&self.ca_file)?;
        }
        if self.user.is_empty() { Ok(()) } else { read_secret_line(&self.password_file).map(drop) }
    }

    /// Returns whether the connections are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.endpoints.iter().any(|each| each.starts_with("https://"))
    }
}

impl NatsAccess {
    /// Checks that the options fit together and that the files can be used.
    pub fn check(&self) -> Result<(), Error> {
        if self.urls.is_empty() || !self.urls.iter().all(|url| is_nats_url(url)) {
            let urls = without_users(&self.urls);
            return refuse(&format!("nats: expected URLs such as nats://127.0.0.1:4222, received {urls:?}"));
        }
        if self.user.is_empty() != self.password_file.is_empty() {
            return refuse("nats_user and nats_password_file belong together: set both or none");
        }
        let ways = [&self.password_file, &self.token_file, &self.nkey_file, &self.credentials_file];
        if ways.iter().filter(|way| !way.is_empty()).count() > 1 {
            return refuse(
                "expected one of nats_password_file, nats_token_file, nats_nkey_file and nats_credentials_file, \
                 received more",
            );
        }
        if !self.ca_file.is_empty() {
            certificates::read_authorities(&self.ca_file)?;
        }
        if self.logs_in() { nats_login::answer(self, b"").map(drop) } else { Ok(()) }
    }

    /// Returns whether there is an identity to show.
    pub fn logs_in(&self) -> bool {
        [&self.password_file, &self.token_file, &self.nkey_file, &self.credentials_file]
            .iter()
            .any(|way| !way.is_empty())
    }

    /// Returns whether the connections are encrypted. A server that does not offer TLS is then refused.
    pub fn is_encrypted(&self) -> bool {
        self.urls.iter().any(|url| url.starts_with("tls://"))
    }
}

/// Returns URLs as one text, without users and passwords.
pub fn without_users(urls: &[String]) -> String {
    let bare = |url: &String| match url.rsplit_once('@') {
        Some((head, host)) => format!("{}{host}", head.split_inclusive("://").next().unwrap_or_default()),
        None => url.clone(),
    };
    urls.iter().map(bare).collect::<Vec<_>>().join(",")
}

/// The library for NATS takes a text without a scheme for the name of a host.
fn is_nats_url(url: &str) -> bool {
    let scheme = url.split_once("://").map_or("", |(scheme, _)| scheme);
    let has_host = |server: ServerAddr| !server.host().is_empty();
    ["nats", "tls", "ws", "wss"].contains(&scheme) && url.parse().is_ok_and(has_host)
}

/// Returns whether a text is host:port, http://host:port or https://host:port.
fn is_endpoint(text: &str) -> bool {
    let address = text.strip_prefix("https://").or(text.strip_prefix("http://")).unwrap_or(text);
    let (host, port) = address.trim_end_matches('/').rsplit_once(':').unwrap_or_default();
    !host.is_empty() && !host.contains('/') && port.parse::<u16>().is_ok()
}

fn refuse(message: &str) -> Result<(), Error> {
    Err(Error::new(Status::InvalidArgument, message))
}

#[cfg(test)]
mod tests {
    use super::{is_endpoint, is_nats_url};

    #[test]
    fn an_address_of_nats_is_a_url() {
        for url in ["nats://127.0.0.1:4222", "nats://host", "tls://host:4222", "nats://user:password@host:4222"] {
            assert!(is_nats_url(url), "{url}");
        }
        for text in ["nope", "127.0.0.1:4222", "http://host:4222", "nats://", "://host", ""] {
            assert!(!is_nats_url(text), "{text}");
        }
    }

    #[test]
    fn an_endpoint_of_etcd_has_host_and_port() {
        for text in ["127.0.0.1:2379", "http://host:2379", "https://host:2379/", "[::1]:2379"] {
            assert!(is_endpoint(text), "{text}");
        }
        for text in ["nope", "host:", ":2379", "host:x", "ftp://host:1", "http://host"] {
            assert!(!is_endpoint(text), "{text}");
        }
    }
}
