"""The options of transport security."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClientAuth = Literal["none", "optional", "required"]
"""Whether clients must present a certificate. With ``optional``, one that is presented must be valid."""


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
    """PEM file with the authorities that peers' certificates must come from; empty for the system's."""
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
