"""The TLS of one process: contexts for its servers and clients, which follow the certificate files."""

from __future__ import annotations

import ipaddress
import ssl

from kvrouter.net.logs import get_logger
from kvrouter.net.tls.certificates import CertificateFiles, InvalidTls, TlsOptions


class Tls:
    """Makes contexts from the files of one process. New connections use the files' newest valid content."""

    def __init__(self, options: TlsOptions) -> None:
        """Reads the files.

        Raises:
            InvalidCertificate: a file cannot be used.
            UnreadableSecret: the key file cannot be read, or everybody can read it.
        """
        self.options = options
        self.files = CertificateFiles(options)
        self.handshakes = 0
        """Number of begun handshakes with a server of this process."""

    @classmethod
    def of(cls, options: TlsOptions | None) -> Tls | None:
        """Returns the TLS for the options; None if they enable none."""
        return cls(options) if options is not None and options.enabled else None

    @property
    def serves(self) -> bool:
        """Whether there is a certificate for servers."""
        return bool(self.options.cert_file)

    def server_context(self, *, grpc: bool = False) -> ssl.SSLContext:
        """Returns a context for an HTTP server, or for a gRPC server on the event loop."""

        def newest() -> ssl.SSLContext | None:
            used = self.files.current()
            return used.calls_context if grpc else used.server_context

        context = newest()
        assert context is not None  # noqa: S101 - callers ask for ``serves`` first

        def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            """Called before each handshake."""
            self.handshakes += 1
            chosen = newest()
            if chosen is not None:
                connection.context = chosen

        context.sni_callback = choose
        return context

    def client_context(self) -> ssl.SSLContext:
        """Returns a context for one connection of an HTTP client."""
        return self.files.current().client_context

    def call_context(self) -> ssl.SSLContext:
        """Returns a context for one connection with a gRPC call."""
        return self.files.current().call_context

    def peer_name(self, role: str) -> str:
        """Returns the name the certificate of a peer with this role must contain; empty for its address."""
        return f"{role}.{self.options.peer_domain}" if role and self.options.peer_domain else ""


log = get_logger(__name__)


def check_port(bind: str, tls: Tls | None) -> None:
    """Checks that a gRPC server may listen on an address, and warns if everybody can read what it serves.

    Raises:
        InvalidTls: TLS is enabled without a certificate.
    """
    warn_if_exposed(bind, tls)
    if tls is not None and not tls.serves:
        raise InvalidTls("tls_ca_file is set: a server also needs tls_cert_file and tls_key_file")


def warn_if_exposed(bind: str, tls: Tls | None) -> None:
    """Logs a warning if a server listens without TLS on an address other machines can reach."""
    if tls is None and not is_loopback(bind.rpartition(":")[0]):
        log.warning(
            "listener.exposed",
            address=bind,
            advice="everybody who reaches this port can read and change what passes: set --tls-cert-file,"
            " --tls-key-file and --tls-client-auth, or bind to loopback",
        )


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a host to listen on."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"
