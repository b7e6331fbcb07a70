"""The system that a command talks to when it is given no address: one that runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.run_files import RunningSystem, running_system

Run = Annotated[
    str | None,
    typer.Option("--run", help="Name of a system that up or serve runs on this machine; needed if there are several."),
]


def chosen_system(run: str | None, *, addresses: Mapping[str, object]) -> RunningSystem | None:
    """Returns the running system to talk to; None if an address is given, or no system runs.

    Its certificates and its user in etcd become those of this command, unless the command has its own.

    Args:
        run: Name of the system; None for the only one.
        addresses: Options that name addresses, with their values.

    Raises:
        WrongUsage: no system has the name, there are several, or an address is given too.
    """
    given = next((option for option, value in addresses.items() if value), None)
    if given is not None:
        if run is not None:
            raise WrongUsage(f"--run excludes {given}: give one of them")
        return None
    from kvrouter.cli.etcd import use_etcd_user, uses_etcd_user
    from kvrouter.cli.tls import use_tls, uses_tls

    system = running_system(run)
    if system is not None and system.tls_ca_file and not uses_tls():
        use_tls(system.tls_cert_file, system.tls_key_file, system.tls_ca_file, system.tls_peer_domain)
    if system is not None and system.etcd_user and not uses_etcd_user():
        use_etcd_user(system.etcd_user, system.etcd_password_file)
    return system
