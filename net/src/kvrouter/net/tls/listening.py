"""Opens the port of a gRPC server, encrypted or not."""

from __future__ import annotations

import ipaddress

import grpc.aio
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.certificates import InvalidTls
from kvrouter.net.tls.tls import Tls

log = get_logger(__name__)


def add_port(server: grpc.aio.Server, bind: str, tls: Tls | None) -> int:
    """Adds a port to a server before its start, and returns its number.

    Raises:
        InvalidTls: TLS is enabled without a certificate.
        RuntimeError: the port is in use or the address is not one of this machine's.
    """
    warn_if_exposed(bind, tls)
    if tls is None:
        return server.add_insecure_port(bind)
    if not tls.serves:
        raise InvalidTls("tls_ca_file is set: a server also needs tls_cert_file and tls_key_file")
    return server.add_secure_port(bind, tls.server_credentials())


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
