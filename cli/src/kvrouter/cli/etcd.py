"""The command's user in etcd: options of the command itself, before the subcommand."""

from __future__ import annotations

from contextvars import ContextVar

from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.tls import plain_tls
from kvrouter.net.etcd import EtcdAccess, InvalidEndpoint
from kvrouter.net.secret_files import UnreadableSecret

_USER: ContextVar[tuple[str, str]] = ContextVar("etcd_user", default=("", ""))


def use_etcd_user(user: str, password_file: str) -> None:
    """Sets the user of this command in etcd and the file with its password."""
    _USER.set((user, password_file))


def uses_etcd_user() -> bool:
    """Returns whether this command has a user in etcd."""
    return bool(_USER.get()[0])


def command_etcd(endpoints: str) -> EtcdAccess:
    """Returns the access of this command to etcd.

    Raises:
        WrongUsage: an endpoint is malformed, or a file cannot be used.
    """
    user, password_file = _USER.get()
    try:
        return EtcdAccess(endpoints, user=user, password_file=password_file, tls=plain_tls())
    except (InvalidEndpoint, UnreadableSecret) as error:
        raise WrongUsage(f"--etcd: {error}") from None
