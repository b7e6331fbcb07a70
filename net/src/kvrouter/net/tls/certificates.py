"""Certificates from files, checked before they are used, and read again when the files change."""

from __future__ import annotations

import ssl
import threading
import time
from dataclasses import dataclass
from typing import Literal

from kvrouter.net.logs import get_logger
from kvrouter.net.secret_files import FileVersion, UnreadableSecret, file_version, read_secret

log = get_logger(__name__)

_CHECK_SECONDS = 1.0
"""Minimum interval between two looks at the files."""

_VERIFY_MODES = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

_Versions = tuple[FileVersion | None, ...]


class InvalidCertificate(ValueError):
    """A certificate, key or authority file cannot be used: unreadable, half-written, expired, or not a pair."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """The checked content of the files at one time."""

    generation: int
    """Number of the content, from 1."""
    chain: bytes | None
    """This process's certificate and the intermediate ones, PEM."""
    key: bytes | None
    """The private key, PEM."""
    authorities: bytes | None
    """Authorities of peers, PEM; None for the system's."""
    expires: float
    """Unix time at which the certificate expires; infinity without one."""
    server_context: ssl.SSLContext | None
    """For HTTP servers; None without a certificate."""
    calls_context: ssl.SSLContext | None
    """For gRPC servers on the event loop; None without a certificate."""
    client_context: ssl.SSLContext
    """For HTTP clients and NATS."""
    call_context: ssl.SSLContext
    """For connections with one gRPC call."""


class CertificateFiles:
    """Follows the files of one process. Unusable content is logged, and the previous one stays in use."""

    def __init__(self, options: TlsOptions) -> None:
        """Reads the files.

        Raises:
            InvalidCertificate: the content cannot be used.
            UnreadableSecret: the key file cannot be read, or everybody can read it.
        """
        self._options = options
        self._lock = threading.Lock()
        self._state = self._look()
        self._checked_at = time.monotonic()
        self._refused = ""
        self.reloads = 0
        """Number of times changed files were taken over."""
        self.failed_reloads = 0
        """Number of times changed files were unusable."""
        self._certificates = self._read(1)

    def current(self) -> Certificates:
        """Returns the certificates of a new connection.

        Reads changed files at once, on the caller's thread: they are a few kilobytes on a local disk, and gRPC asks
        in the middle of a handshake.
        """
        with self._lock:
            now = time.monotonic()
            if now - self._checked_at >= _CHECK_SECONDS:
                self._checked_at = now
                state = self._look()
                # Files that were refused are tried again: they may have been read between two writes.
                if state != self._state or self._refused:
                    self._reload(state)
            return self._certificates

    def _reload(self, state: _Versions) -> None:
        try:
            read = self._read(self._certificates.generation + 1)
        except (InvalidCertificate, UnreadableSecret) as error:
            if state != self._state or str(error) != self._refused:
                self.failed_reloads += 1
                log.error("tls.reload_refused", cause=str(error), uses="the previous certificate")
            self._refused, self._state = str(error), state
            return
        if self._refused and self._same(read):
            self._refused, self._state = "", state
            return
        self._refused, self._state, self._certificates = "", state, read
        self.reloads += 1
        log.info("tls.reloaded", certificate=self._options.cert_file, expires_unix=round(read.expires, 0))

    def _same(self, read: Certificates) -> bool:
        used = self._certificates
        return (read.chain, read.key, read.authorities) == (used.chain, used.key, used.authorities)

    def _look(self) -> _Versions:
        return tuple(file_version(path) for path in self._files())

    def _files(self) -> tuple[str, ...]:
        return tuple(filter(None, (self._options.cert_file, self._options.key_file, self._options.ca_file)))

    def _read(self, generation: int) -> Certificates:
        options = self._options
        content = self._contents()
        client, call = _client_context(options), _client_context(options)
        call.set_alpn_protocols(["h2"])
        server, calls, expires = None, None, float("inf")
        if options.cert_file:
            expires = _expiry(options, content[0] or b"")
            server = _server_context(options, "http/1.1", options.http_client_auth)
            calls = _server_context(options, "h2", options.client_auth)
            _load_pair(client, options)
            _load_pair(call, options)
        # The library reads files itself. Both readings must have seen the same content.
        if self._contents() != content:
            raise InvalidCertificate(f"{', '.join(self._files())}: changed while they were read")
        return Certificates(generation, *content, expires, server, calls, client, call)

    def _contents(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        options = self._options
        return (
            _read_public(options.cert_file) if options.cert_file else None,
            read_secret(options.key_file) if options.key_file else None,
            _read_public(options.ca_file) if options.ca_file else None,
        )


def _read_public(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InvalidCertificate(f"{path}: {error.strerror}: expected a PEM file that this process can read") from None


def _client_context(options: TlsOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca_file or None)
    except (ssl.SSLError, OSError) as error:
        raise InvalidCertificate(f"{options.ca_file}: expected certificates of authorities, PEM: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _server_context(options: TlsOptions, protocol: str, client_auth: ClientAuth) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols([protocol])
    _load_pair(context, options)
    if options.ca_file:
        context.load_verify_locations(options.ca_file)
    context.verify_mode = _VERIFY_MODES[client_auth]
    # A resumed session would outlive the authority that vouched for its client.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    return context


def _load_pair(context: ssl.SSLContext, options: TlsOptions) -> None:
    try:
        # Without a password the library would ask for one on the terminal.
        context.load_cert_chain(options.cert_file, options.key_file, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InvalidCertificate(
            f"{options.cert_file}, {options.key_file}: expected a certificate and its unencrypted key, PEM: {error}"
        ) from None


def _expiry(options: TlsOptions, chain: bytes) -> float:
    """Returns when a certificate expires, Unix time, after a handshake with itself in memory.

    Raises:
        InvalidCertificate: the pair cannot serve a handshake, because it is expired, not yet valid, or no pair.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(server, options)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    end = b"-----END CERTIFICATE-----"
    try:
        client.load_verify_locations(cadata=(chain.partition(end)[0] + end).decode("ascii", "ignore"))
        shown = _shake_hands(server, client)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidCertificate(f"{options.cert_file}: expected a certificate that is valid now: {error}") from None
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """Connects the two in memory and returns the certificate the client saw."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=None),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    open_sides = list(sides)
    for _ in range(10):
        for side in list(open_sides):
            try:
                side.do_handshake()
                open_sides.remove(side)
            except ssl.SSLWantReadError:
                continue
    return dict(sides[0].getpeercert() or {})


ClientAuth = Literal["none", "optional", "required"]
"""Whether clients must present a certificate. With ``optional``, one presented must be valid."""


class InvalidTls(ValueError):
    """Options of transport security contradict each other or lack one."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """Files and rules of the TLS of one process.

    Raises:
        InvalidTls: the options contradict each other.
    """

    cert_file: str = ""
    """PEM file with this process's certificate and the intermediate ones; for its servers, and shown to servers."""
    key_file: str = ""
    """PEM file with the certificate's private key, not encrypted; mode 0600 or 0640."""
    ca_file: str = ""
    """PEM file with the authorities of peers' certificates; empty for the system's."""
    client_auth: ClientAuth = "none"
    """Whether gRPC clients must present a certificate of ``ca_file``: none or required. gRPC has no ``optional``."""
    http_client_auth: ClientAuth = "none"
    """Whether HTTP clients must present a certificate of ``ca_file``."""
    peer_domain: str = ""
    """If set, the certificate of a peer must contain the peer's role in this domain, such as
    ``worker.kvrouter.internal``, and its address is not compared. For workers whose addresses change."""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise InvalidTls("tls_cert_file and tls_key_file belong together: set both or none")
        if self.client_auth not in {"none", "required"}:
            raise InvalidTls(f"tls_client_auth: expected none or required, received {self.client_auth!r}")
        if {self.client_auth, self.http_client_auth} != {"none"} and not (self.ca_file and self.cert_file):
            raise InvalidTls("tls_client_auth required needs tls_ca_file, tls_cert_file and tls_key_file")

    @property
    def enabled(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.cert_file or self.ca_file)
