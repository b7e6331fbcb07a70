"""``kvrouter certs``: creates certificates, keys and accounts of a secure system for development."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.v1.names import ComponentName, InvalidName, check_name

if TYPE_CHECKING:
    from kvrouter.devtools.system.credentials import Credentials


def certs_command(
    directory: Annotated[Path, typer.Argument(help="Directory for the files; created with mode 0700.")],
    namespace: Annotated[str, typer.Option(help="Namespace of the services.")] = "kvrouter",
    component: Annotated[
        list[str] | None, typer.Option(help="Component of the workers; repeatable. By default workers.")
    ] = None,
    worker: Annotated[
        list[str] | None, typer.Option(help="COMPONENT/ID of a worker that gets an identity; repeatable.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address that the certificates contain besides loopback; repeatable."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, help="Validity of the certificates, in days.")] = 365,
) -> None:
    """Create a development CA, certificates, and accounts of NATS and etcd; keys that exist are kept."""
    from kvrouter.devtools.system.accounts import Namespace
    from kvrouter.devtools.system.certificates import LOOPBACK
    from kvrouter.devtools.system.credentials import Credentials

    workers = [_worker(text) for text in worker or ()]
    components = tuple(dict.fromkeys([*(component or ["workers"]), *(name for name, _ in workers)]))
    try:
        for name in (namespace, *components):
            check_name(name)
        credentials = Credentials(
            directory, Namespace(namespace, components), workers, hosts=[*LOOPBACK, *(host or ())], days=days
        )
    except InvalidName as error:
        raise WrongUsage(str(error)) from None
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    _describe(credentials)


def _worker(text: str) -> tuple[str, int]:
    component, _, number = text.partition("/")
    if not number.isdecimal() or int(number) >= 1 << 64:
        raise WrongUsage(f"--worker: expected COMPONENT/ID, such as workers/1, received {text!r}")
    try:
        return ComponentName("kvrouter", component).name, int(number)
    except InvalidName as error:
        raise WrongUsage(str(error)) from None


def _describe(credentials: Credentials) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    names = ", ".join(credentials.identities)
    for line in (
        f"{credentials.folder}: ca.crt and ca.key (keep it apart), and for each of {names}:",
        "  NAME.crt, NAME.key (TLS), NAME.nkey (NATS), NAME.etcd-password",
        "  nats.crt, nats.key, nats-accounts.conf: for nats-server; etcd.crt, etcd.key, etcd-accounts.sh: for etcd",
        "  service-token: for --service-token-file of services without certificates; service-token.digest: of workers",
        "  cache-salt.key: for --cache-salt-key-file of Frontends, where tenants are isolated",
        "options of the Scheduler:",
        f"  {' '.join(credentials.identities['scheduler'].options())}",
    ):
        console.print(line, soft_wrap=True)
