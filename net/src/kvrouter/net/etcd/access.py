"""Where etcd is, and how to authenticate there."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvrouter.net.secret_files import FollowedSecret, read_secret_line
from kvrouter.net.tls.certificates import TlsOptions
from kvrouter.net.tls.tls import Tls


class InvalidEndpoint(ValueError):
    """An etcd endpoint is not ``host:port``, or its user and password are incomplete."""


class EtcdAccess:
    """Endpoints of etcd, with user and certificates. Endpoints with ``https://`` are reached with TLS."""

    def __init__(self, endpoints: str, *, user: str = "", password_file: str = "", tls: Tls | None = None) -> None:
        """Connects to nothing.

        Args:
            endpoints: ``host:port``, ``http://host:port`` or ``https://host:port``, separated by commas.
            user: Name of the etcd user; empty for none.
            password_file: File with the user's password; read at each connection, so it can be replaced.
            tls: Certificates for ``https``; by default the system's authorities are trusted.

        Raises:
            InvalidEndpoint: an endpoint is malformed, or user and password file are not given together.
            UnreadableSecret: the password file cannot be used.
        """
        if bool(user) != bool(password_file):
            raise InvalidEndpoint("the etcd user and its password file belong together: set both or none")
        self.endpoints = endpoints
        self.user = user
        self.parsed = parse_endpoints(endpoints)
        encrypted = any(scheme == "https" for scheme, _, _ in self.parsed)
        self.tls = (tls or Tls(TlsOptions())) if encrypted else None
        self.password = FollowedSecret(password_file, read_secret_line) if password_file else None

    def __str__(self) -> str:
        """Returns the endpoints, for logs."""
        return self.endpoints

    @classmethod
    def of(cls, target: str | EtcdAccess) -> EtcdAccess:
        """Returns the access to endpoints without a user.

        Raises:
            InvalidEndpoint: an endpoint is malformed.
        """
        return target if isinstance(target, EtcdAccess) else cls(target)


def parse_endpoints(endpoints: str) -> tuple[tuple[str, str, int], ...]:
    """Parses endpoints as ``host:port`` or ``http(s)://host:port``, separated by commas: (scheme, host, port) of each.

    Raises:
        InvalidEndpoint: an endpoint has another form, or a scheme other than http and https.
    """
    parsed = []
    for text in filter(None, (part.strip() for part in endpoints.split(","))):
        url = urlsplit(text if "://" in text else f"http://{text}")
        if url.username is not None:
            raise InvalidEndpoint("an etcd endpoint contains a user: use etcd_user and etcd_password_file")
        try:
            host, port = url.hostname, url.port
        except ValueError as error:
            raise InvalidEndpoint(f"etcd endpoint {text!r}: {error}") from None
        if url.scheme not in {"http", "https"} or not host or port is None or url.path.strip("/"):
            raise InvalidEndpoint(f"etcd endpoint {text!r}: expected host:port, http://host:port or https://host:port")
        parsed.append((url.scheme, f"[{host}]" if ":" in host else host, port))
    if not parsed:
        raise InvalidEndpoint("expected an etcd endpoint as host:port, received none")
    return tuple(parsed)
