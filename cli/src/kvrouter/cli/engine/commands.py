"""Declares the commands of ``kvrouter engine``; they import their implementation when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.cli.running import Run, chosen_system

engine_app = typer.Typer(help="Add engines to kvrouter serve --engine, and take them out.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(help="URL of the engine's HTTP API, http://host:port, or COMPONENT=URL.")]
EnginesFile = Annotated[
    Path | None,
    typer.Option(
        "--engines-file", help="The file that the process follows; by default of the process on this machine."
    ),
]


@engine_app.command("add")
def add_command(url: Url, run: Run = None, engines_file: EnginesFile = None) -> None:
    """Let an engine join: its URL is added to the file of engines."""
    from kvrouter.cli.engine.file import add

    path = _file(run, engines_file)
    print(f"{url} {'joins' if add(path, url) else 'was there already'}: {path}")  # noqa: T201


@engine_app.command("remove")
def remove_command(url: Url, run: Run = None, engines_file: EnginesFile = None) -> None:
    """Take an engine out after its running requests: its URL is removed from the file of engines."""
    from kvrouter.cli.engine.file import remove

    path = _file(run, engines_file)
    print(f"{url} {'leaves' if remove(path, url) else 'is not in the file'}: {path}")  # noqa: T201


@engine_app.command("drain")
def drain_command(
    url: Url,
    component: Annotated[
        str, typer.Option("--component", help="Component of the engine, namespace/name.")
    ] = "kvrouter/workers",
    run: Run = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which running requests continue on other engines; none lets them end."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Longest wait until no request runs on the engine, in seconds; 0 for none.")
    ] = 600.0,
) -> None:
    """Stop new requests to an engine, and wait until its running ones have ended. It stays followed."""
    from kvrouter.cli.drain import drain
    from kvrouter.cli.top.sources import Where
    from kvrouter.sidecar.engine_options import worker_id_of
    from kvrouter.sidecar.engines_file import split_component

    system = chosen_system(run, addresses={})
    if system is None or not system.scheduler:
        raise WrongUsage("no process of kvrouter serve --engine runs here")
    where = Where([system.scheduler], [], "", system.namespace)
    name, address = split_component(url)
    if name:
        component = f"{component.partition('/')[0]}/{name}"
    run_interruptibly(drain(where, component, worker_id_of(address), migrate_after_seconds=timeout, wait_seconds=wait))


def _file(run: str | None, given: Path | None) -> Path:
    system = chosen_system(run, addresses={"--engines-file": given})
    if given is not None:
        return given
    if system is None or not system.engines_file:
        raise WrongUsage("no process here follows a file of engines: start kvrouter serve with --engines-file")
    return Path(system.engines_file)
