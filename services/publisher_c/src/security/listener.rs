//! Accepts encrypted connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::TcpIncoming;

use super::certificates::ServerCertificates;
use crate::log::Log;

/// Time for a client to complete the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Number of handshakes at once; further clients wait in the backlog of the socket.
const MOST_HANDSHAKES: usize = 1024;

/// Connections that were refused.
#[derive(Default)]
pub struct Refused(AtomicU64);

impl Refused {
    /// Counts one, and returns how many there are now.
    pub fn count(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn total(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the connections whose handshake succeeded. Refused ones are counted, and logged ever more rarely.
pub fn encrypted(
    listener: TcpListener,
    certificates: ServerCertificates,
    refused: Arc<Refused>,
    log: Arc<Log>,
) -> impl Stream<Item = io::Result<TlsStream<TcpStream>>> {
    let note = move |error: io::Error| {
        let count = refused.count();
        if count.is_power_of_two() {
            log.warning("tls.connection_refused", format_args!("refused={count} error={error}"));
        }
    };
    TcpIncoming::from(listener)
        .with_nodelay(Some(true))
        .map(move |accepted| {
            let acceptor = certificates.newest();
            async move {
                let shaken = tokio::time::timeout(HANDSHAKE, acceptor.accept(accepted?)).await;
                shaken.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "the handshake took too long")))
            }
        })
        .buffer_unordered(MOST_HANDSHAKES)
        // An error here is one client's, and must not reach the server, which might end.
        .filter_map(move |shaken| std::future::ready(shaken.map_err(&note).ok().map(Ok)))
}
