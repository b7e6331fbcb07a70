"""Declares ``kvrouter up``."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.interrupts import Interrupted, run_interruptibly
from kvrouter.devcommands.declarations.options import Blocks, BlockSize, Workers, check_modes, parse_time_scale
from kvrouter.devtools.system.ports import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT


def up_command(
    workers: Workers = 8,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="Number of prefill workers; with --decode, in the place of --workers.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="Number of decode workers; with --prefill, in the place of --workers.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="File with the fleet as [fleet], and options of the Scheduler, as kvrouter tune writes it."),
    ] = None,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    clock: Annotated[float, typer.Option(help="Engine seconds that pass in one second of wall time.")] = 1.0,
    mode: Annotated[str, typer.Option(help="Routing mode.")] = "forecast",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=f"Port of the HTTP API; {DEFAULT_HTTP_PORT}, or a free one if that is taken, by default.",
        ),
    ] = None,
    logs: Annotated[Path, typer.Option(help="Directory for the logs.")] = Path("up-logs"),
    secure: Annotated[
        bool, typer.Option("--secure", help="Encrypt and authenticate every connection, with keys made for this run.")
    ] = False,
) -> None:
    """Start a whole system on loopback ports and keep it running until Ctrl-C; processes that die are restarted."""
    from kvrouter.devcommands.fleet_file import read_fleet
    from kvrouter.devcommands.up import UpOptions, choose_port, up
    from rich.console import Console

    check_modes([mode])
    parse_time_scale(1.0, clock)
    if (prefill is None) != (decode is None):
        raise WrongUsage("expected --prefill and --decode together, received one of them")
    if config is not None:
        if mode != "forecast":
            raise WrongUsage("--mode excludes --config: set router_mode in the file")
        fleet = read_fleet(config)
        if fleet is not None and prefill is None:
            workers, prefill, decode = fleet.others, fleet.prefill or None, fleet.others
    http_port = choose_port(port, DEFAULT_HTTP_PORT)
    grpc_port = choose_port(None, DEFAULT_GRPC_PORT)
    pools = (decode or workers, prefill or 0)
    options = UpOptions(*pools, blocks, block_size, clock, mode, http_port, grpc_port, logs, secure, config)
    console = Console()
    with suppress(Interrupted):  # the intended way to end
        run_interruptibly(up(options, console))
    console.print("stopped; nothing is left running")
