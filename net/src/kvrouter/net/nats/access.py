"""Where NATS is, and how to authenticate there."""

from __future__ import annotations

import ssl
from typing import Any
from urllib.parse import urlsplit

from kvrouter.net.secret_files import FollowedSecret, read_secret, read_secret_line
from kvrouter.net.tls import Tls, TlsOptions

_SCHEMES = frozenset({"nats", "tls", "ws", "wss"})


class InvalidNats(ValueError):
    """A URL of NATS is malformed, or several ways to authenticate are given."""


class NatsAccess:
    """URLs of NATS, with an identity and certificates. URLs with ``tls://`` or ``wss://`` are reached with TLS only."""

    def __init__(
        self,
        urls: str,
        *,
        user: str = "",
        password_file: str = "",
        token_file: str = "",
        nkey_file: str = "",
        credentials_file: str = "",
        inbox_prefix: str = "",
        tls: Tls | None = None,
    ) -> None:
        """Connects to nothing.

        Args:
            urls: ``nats://host:port`` or ``tls://host:port``, separated by commas.
            user: User name, with ``password_file``.
            password_file: File with the password; this and the other files are read at each connection.
            token_file: File with a token.
            nkey_file: File with the seed of an NKEY.
            credentials_file: Credentials file (``.creds``) of a decentralized account.
            inbox_prefix: Prefix of the subjects of replies; a prefix for each user keeps others from reading them.
            tls: Certificates; by default the system's authorities are trusted.

        Raises:
            InvalidNats: a URL is malformed, or there is more than one way to authenticate.
            UnreadableSecret: a file cannot be used.
        """
        self.servers = [text for part in urls.split(",") if (text := part.strip())]
        for text in self.servers:
            _check_url(text)
        if not self.servers:
            raise InvalidNats("expected a URL of NATS such as nats://127.0.0.1:4222, received none")
        if bool(user) != bool(password_file):
            raise InvalidNats("the user of NATS and its password file belong together: set both or none")
        ways = [way for way in (password_file, token_file, nkey_file, credentials_file) if way]
        if len(ways) > 1:
            raise InvalidNats(
                "expected one of password file, token file, NKEY file and credentials file, received more"
            )
        self.encrypted = any(text.startswith(("tls://", "wss://")) for text in self.servers)
        self.tls = (tls or Tls(TlsOptions())) if self.encrypted else None
        self._options: dict[str, Any] = {}
        if user:
            self._options |= {"user": user, "password": FollowedSecret(password_file, read_secret_line)}
        elif token_file:
            self._options["token"] = FollowedSecret(token_file, read_secret_line)
        elif nkey_file or credentials_file:
            read_secret(nkey_file or credentials_file)
            _check_nkeys()
            self._options["nkeys_seed" if nkey_file else "user_credentials"] = nkey_file or credentials_file
        if inbox_prefix:
            self._options["inbox_prefix"] = inbox_prefix

    def __str__(self) -> str:
        """Returns the URLs without users and passwords, for logs."""
        return ",".join(_without_user(text) for text in self.servers)

    @classmethod
    def of(cls, target: str | NatsAccess) -> NatsAccess:
        """Returns the access to plain URLs.

        Raises:
            InvalidNats: a URL is malformed.
        """
        return target if isinstance(target, NatsAccess) else cls(target)

    def options(self) -> dict[str, Any]:
        """Returns the options of the client library for this identity."""
        return dict(self._options)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns the certificates for the next connection; None for plain text."""
        return None if self.tls is None else self.tls.client_context()


def _check_url(text: str) -> None:
    url = urlsplit(text if "://" in text else f"nats://{text}")
    try:
        is_valid = url.scheme in _SCHEMES and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        is_valid = False
    if not is_valid:
        raise InvalidNats(f"expected a URL such as nats://127.0.0.1:4222, received {_without_user(text)!r}")


def _without_user(url: str) -> str:
    scheme, found, rest = url.rpartition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"


def _check_nkeys() -> None:
    try:
        import nkeys  # noqa: F401  # the client library imports it at the first connection
    except ModuleNotFoundError:
        raise InvalidNats("NKEY and credentials files need a package: pip install nkeys") from None
