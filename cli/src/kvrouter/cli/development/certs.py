"""``kvrouter certs``: creates a certificate authority for development, and certificates of all services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import CommandFailed
from kvrouter.devtools.system.certificates import LOOPBACK, PEER_DOMAIN, ROLES, DevelopmentAuthority
from rich.console import Console


def certs_command(
    directory: Annotated[Path, typer.Argument(help="Directory for the files; created with mode 0700.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Host name or address that the certificates contain besides loopback; repeatable."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.001, help="Validity of the certificates, in days.")] = 365,
) -> None:
    """Create a development CA and a certificate for each service; an existing CA issues new certificates."""
    try:
        authority = DevelopmentAuthority(directory, days=days)
        for role in ROLES:
            authority.issue(role, [*LOOPBACK, *(host or ())])
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    console = Console(highlight=False)
    console.print(f"{directory}: ca.crt, ca.key (keep it apart), and NAME.crt, NAME.key for {', '.join(ROLES)}")
    console.print(f"Each contains NAME.{PEER_DOMAIN}. Options of the Scheduler, for example:", soft_wrap=True)
    console.print(
        f"  --tls-cert-file {directory}/scheduler.crt --tls-key-file {directory}/scheduler.key"
        f" --tls-ca-file {directory}/ca.crt --tls-client-auth required --tls-peer-domain {PEER_DOMAIN}",
        soft_wrap=True,
    )
