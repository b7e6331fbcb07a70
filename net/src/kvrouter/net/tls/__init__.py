"""Transport security: certificates from files, which are read again when they change, for gRPC and HTTP."""

from kvrouter.net.tls.certificates import ClientAuth, InvalidCertificate, InvalidTls, TlsOptions
from kvrouter.net.tls.channel import open_channel
from kvrouter.net.tls.tls import Tls, check_port, warn_if_exposed

__all__ = [
    "ClientAuth",
    "InvalidCertificate",
    "InvalidTls",
    "Tls",
    "TlsOptions",
    "check_port",
    "open_channel",
    "warn_if_exposed",
]
