"""The command's connections to services and etcd, with its certificates, its API key and its user.

They are options of the command itself, before the subcommand.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

import grpc.aio
from kvrouter.cli.errors import WrongUsage
from kvrouter.net.auth import ServiceToken
from kvrouter.net.etcd import EtcdAccess, InvalidEndpoint
from kvrouter.net.secret_files import UnreadableSecret, read_secret_line
from kvrouter.net.tls import InvalidCertificate, InvalidTls, Tls, TlsOptions
from kvrouter.runtime.rpc import open_channel

_TLS_OPTIONS: ContextVar[TlsOptions | None] = ContextVar("tls_options", default=None)


def use_tls(cert_file: str, key_file: str, ca_file: str, peer_domain: str) -> None:
    """Sets the options of this command's connections; the files are read when the first one is opened.

    Raises:
        WrongUsage: the options contradict each other.
    """
    try:
        _TLS_OPTIONS.set(TlsOptions(cert_file, key_file, ca_file, peer_domain=peer_domain))
    except InvalidTls as error:
        raise WrongUsage(str(error)) from None


def uses_tls() -> bool:
    """Returns whether this command has certificates or authorities of its own."""
    options = _TLS_OPTIONS.get()
    return options is not None and options.enabled


def command_tls() -> Tls | None:
    """Returns the TLS of this command's connections to services; None for plain text.

    Raises:
        WrongUsage: a file cannot be used.
    """
    return _tls_of(_TLS_OPTIONS.get())


def plain_tls() -> Tls | None:
    """Returns the same without roles, for etcd.

    Raises:
        WrongUsage: a file cannot be used.
    """
    options = _TLS_OPTIONS.get()
    return _tls_of(None if options is None else replace(options, peer_domain=""))


def _tls_of(options: TlsOptions | None) -> Tls | None:
    try:
        return Tls.of(options)
    except (InvalidCertificate, UnreadableSecret) as error:
        raise WrongUsage(str(error)) from None


_ETCD_USER: ContextVar[tuple[str, str]] = ContextVar("etcd_user", default=("", ""))


def use_etcd_user(user: str, password_file: str) -> None:
    """Sets the user of this command in etcd and the file with its password."""
    _ETCD_USER.set((user, password_file))


def uses_etcd_user() -> bool:
    """Returns whether this command has a user in etcd."""
    return bool(_ETCD_USER.get()[0])


def command_etcd(endpoints: str) -> EtcdAccess:
    """Returns the access of this command to etcd.

    Raises:
        WrongUsage: an endpoint is malformed, or a file cannot be used.
    """
    user, password_file = _ETCD_USER.get()
    try:
        return EtcdAccess(endpoints, user=user, password_file=password_file, tls=plain_tls())
    except (InvalidEndpoint, UnreadableSecret) as error:
        raise WrongUsage(f"--etcd: {error}") from None


_API_KEY_FILE: ContextVar[str] = ContextVar("api_key_file", default="")


def use_api_key(path: str) -> None:
    """Sets the file with the API key or token of this command; empty for none."""
    _API_KEY_FILE.set(path)


def command_api_key() -> str:
    """Returns the API key of this command; empty for none.

    Raises:
        WrongUsage: the file cannot be used.
    """
    path = _API_KEY_FILE.get()
    try:
        return read_secret_line(path) if path else ""
    except UnreadableSecret as error:
        raise WrongUsage(f"--api-key-file: {error}") from None


def service_token(path: str) -> ServiceToken | None:
    """Returns the token that this command shows to services; None if ``path`` is empty.

    Raises:
        WrongUsage: the file cannot be used.
    """
    try:
        return ServiceToken.of(path)
    except UnreadableSecret as error:
        raise WrongUsage(f"--service-token-file: {error}") from None


def open_service(address: str, role: str) -> grpc.aio.Channel:
    """Returns a channel to a service with this role: frontend, scheduler or indexer.

    Raises:
        WrongUsage: a file cannot be used.
    """
    return open_channel(address, tls=command_tls(), role=role, api_key=command_api_key())
