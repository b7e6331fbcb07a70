"""The TLS of the command's connections: options of the command itself, before the subcommand."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import replace

from kvrouter.cli.errors import WrongUsage
from kvrouter.net.secret_files import UnreadableSecret
from kvrouter.net.tls import InvalidCertificate, InvalidTls, Tls, TlsOptions

_OPTIONS: ContextVar[TlsOptions | None] = ContextVar("tls_options", default=None)


def use_tls(cert_file: str, key_file: str, ca_file: str, peer_domain: str) -> None:
    """Sets the options of this command's connections; the files are read when the first one is opened.

    Raises:
        WrongUsage: the options contradict each other.
    """
    try:
        _OPTIONS.set(TlsOptions(cert_file, key_file, ca_file, peer_domain=peer_domain))
    except InvalidTls as error:
        raise WrongUsage(str(error)) from None


def uses_tls() -> bool:
    """Returns whether this command has certificates or authorities of its own."""
    options = _OPTIONS.get()
    return options is not None and options.enabled


def command_tls() -> Tls | None:
    """Returns the TLS of this command's connections to services; None for plain text.

    Raises:
        WrongUsage: a file cannot be used.
    """
    return _made(_OPTIONS.get())


def plain_tls() -> Tls | None:
    """Returns the same without roles, for etcd.

    Raises:
        WrongUsage: a file cannot be used.
    """
    options = _OPTIONS.get()
    return _made(None if options is None else replace(options, peer_domain=""))


def _made(options: TlsOptions | None) -> Tls | None:
    try:
        return Tls.of(options)
    except (InvalidCertificate, UnreadableSecret) as error:
        raise WrongUsage(str(error)) from None
