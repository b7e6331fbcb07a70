"""The TLS of the command's connections: options of the command itself, before the subcommand."""

from __future__ import annotations

from contextvars import ContextVar

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


def command_tls() -> Tls | None:
    """Returns the TLS of this command's connections; None for plain text.

    Raises:
        WrongUsage: a file cannot be used.
    """
    try:
        return Tls.of(_OPTIONS.get())
    except (InvalidCertificate, UnreadableSecret) as error:
        raise WrongUsage(str(error)) from None
