"""Declares ``kvrouter component …``."""

from __future__ import annotations

from typing import Annotated

import typer
from kvrouter.cli.interrupts import run_interruptibly

component_app = typer.Typer(help="Remove components that are not needed any more.", no_args_is_help=True)

Etcd = Annotated[
    str,
    typer.Option(envvar=["KVROUTER_ETCD", "ETCD_ENDPOINTS"], help="Endpoints of etcd, host:port, separated by commas."),
]


@component_app.command("forget")
def forget(
    component: Annotated[str, typer.Argument(help="namespace/component.")], etcd: Etcd = "127.0.0.1:2379"
) -> None:
    """Delete a component's descriptor, so that workers of another model or block size can form it anew.

    Refused while a worker of the component is registered, unless the workers disagree with the descriptor.
    """
    from kvrouter.cli.forget import forget_component

    run_interruptibly(forget_component(component, etcd))
