"""The command's connections to services, with its certificates and its API key."""

from __future__ import annotations

from contextvars import ContextVar

import grpc.aio
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.tls import command_tls
from kvrouter.net.auth import ServiceToken
from kvrouter.net.secret_files import UnreadableSecret, read_secret_line
from kvrouter.runtime.rpc import open_channel

_KEY_FILE: ContextVar[str] = ContextVar("api_key_file", default="")


def use_api_key(path: str) -> None:
    """Sets the file with the API key or token of this command; empty for none."""
    _KEY_FILE.set(path)


def command_api_key() -> str:
    """Returns the API key of this command; empty for none.

    Raises:
        WrongUsage: the file cannot be used.
    """
    path = _KEY_FILE.get()
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
