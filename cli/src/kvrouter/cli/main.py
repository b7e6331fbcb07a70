"""The `kvrouter` command."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from kvrouter.cli.component import component_app
from kvrouter.cli.demo import DemoOptions, demo
from kvrouter.cli.errors import CommandFailed, WrongUsage, reason_of
from kvrouter.cli.explain import explain
from kvrouter.cli.index import index_app
from kvrouter.cli.interrupts import Interrupted, run_interruptibly
from kvrouter.cli.replay import ReplayCommand, replay_running
from kvrouter.cli.simulate import OfModel, simulate_command
from kvrouter.cli.top.command import top, top_once
from kvrouter.cli.top.sources import Where
from kvrouter.cli.up import UpOptions, choose_port, up
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.system.processes import ProcessDied
from kvrouter.devtools.system.servers import BinaryMissing, StartFailed
from kvrouter.devtools.system.stack import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT, StackFailed
from kvrouter.devtools.traces.reader import TraceError, TraceRequest, read_shipped_trace, read_trace
from kvrouter.net.etcd import InvalidEndpoint, parse_endpoints
from kvrouter.runtime.version import VERSION
from kvrouter.simulator.plan import NAMES
from kvrouter.v1.names import InvalidName, check_name
from rich.console import Console

DEFAULT_LOAD = 2.5
DEFAULT_CLOCK = 2.0
DEFAULT_REQUESTS = 800

app = typer.Typer(
    name="kvrouter",
    help="Routes LLM requests to the worker whose KV cache already holds most of their prompt.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(index_app, name="index")
app.add_typer(component_app, name="component")

Load = Annotated[float, typer.Option(help="Arrival rate relative to the trace.")]
Requests = Annotated[
    int | None, typer.Option(min=1, help="Number of requests to replay from the start of the trace; all by default.")
]
Workers = Annotated[int, typer.Option(min=1, help="Number of simulated engines, each a process.")]
Blocks = Annotated[int, typer.Option(min=1, help="KV blocks of each engine.")]
Etcd = Annotated[
    str,
    typer.Option(
        envvar=["KVROUTER_ETCD", "ETCD_ENDPOINTS"],
        help="Endpoints of etcd, host:port, separated by commas.",
    ),
]
Namespace = Annotated[str, typer.Option(envvar="KVROUTER_NAMESPACE", help="Namespace of the services in etcd.")]
Schedulers = Annotated[
    list[str] | None,
    typer.Option("--scheduler", help="gRPC address of a Scheduler, host:port, instead of discovery through etcd."),
]
DEFAULT_ETCD = "127.0.0.1:2379"
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV block.")]


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        print(f"kvrouter {VERSION}")  # noqa: T201
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201


@app.command("demo")
def demo_command(
    trace: Annotated[Path | None, typer.Option(help="Mooncake trace; the shipped one by default.")] = None,
    requests: Requests = None,
    load: Load = DEFAULT_LOAD,
    clock: Annotated[float, typer.Option(help="Engine seconds that pass in one second of wall time.")] = DEFAULT_CLOCK,
    workers: Workers = 8,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    mode: Annotated[list[str] | None, typer.Option(help="Routing mode to run; round-robin and kv by default.")] = None,
    results: Annotated[Path, typer.Option(help="Directory for the picture, the results as JSON, and the logs.")] = Path(
        "demo-results"
    ),
) -> None:
    """Replay a real trace through a whole system, once for each routing mode, and compare the results."""
    modes = _modes(mode or ["round-robin", "kv"])
    limit = DEFAULT_REQUESTS if requests is None and trace is None else requests
    options = DemoOptions(
        requests=_requests(trace, limit),
        trace_name=str(trace) if trace is not None else "conversation_trace.jsonl.gz (shipped)",
        time_scale=_time_scale(load, clock),
        modes=modes,
        workers=workers,
        blocks=blocks,
        block_size=block_size,
        results=results,
    )
    run_statistics = run_interruptibly(demo(options, Console()))
    if not all(run.valid and not run.errors for run in run_statistics):
        raise typer.Exit(1)


@app.command("up")
def up_command(
    workers: Workers = 8,
    blocks: Blocks = 16_384,
    block_size: BlockSize = 16,
    clock: Annotated[float, typer.Option(help="Engine seconds that pass in one second of wall time.")] = 1.0,
    mode: Annotated[str, typer.Option(help="Routing mode.")] = "kv",
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help=f"Port of the HTTP API; {DEFAULT_HTTP_PORT}, or a free one if that is taken, by default.",
        ),
    ] = None,
    logs: Annotated[Path, typer.Option(help="Directory for the logs.")] = Path("up-logs"),
) -> None:
    """Start a whole system on loopback ports and keep it running until Ctrl-C; processes that die are restarted."""
    _modes([mode])
    _time_scale(1.0, clock)
    http_port = choose_port(port, DEFAULT_HTTP_PORT)
    grpc_port = choose_port(None, DEFAULT_GRPC_PORT)
    options = UpOptions(workers, blocks, block_size, clock, mode, http_port, grpc_port, logs)
    console = Console()
    with suppress(Interrupted):  # the way in which it is meant to end
        run_interruptibly(up(options, console))
    console.print("stopped; nothing is left running")


@app.command("replay")
def replay_command(
    trace: Annotated[
        Path | None, typer.Argument(help="Mooncake trace or recording; the shipped trace by default.")
    ] = None,
    target: Annotated[
        str, typer.Option(help="gRPC address of the Frontend, host:port.")
    ] = f"127.0.0.1:{DEFAULT_GRPC_PORT}",
    indexer: Annotated[
        str | None, typer.Option(help="gRPC address of an Indexer whose events are counted, host:port.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to request; needed only if several are served.")] = None,
    of_model: OfModel = None,
    requests: Requests = None,
    load: Load = 1.0,
    clock: Annotated[
        float, typer.Option(help="Engine seconds that pass in one second of wall time at the running engines.")
    ] = 1.0,
    mode: Annotated[str | None, typer.Option(help="Routing mode; the Scheduler's own by default.")] = None,
    results: Annotated[Path | None, typer.Option(help="Directory for a picture and the results as JSON.")] = None,
) -> None:
    """Replay a trace against a running system."""
    if mode is not None:
        _modes([mode])
    command = ReplayCommand(
        requests=_requests(trace, requests, of_model),
        trace_name=str(trace) if trace is not None else "conversation_trace.jsonl.gz (shipped)",
        target=_address(target),
        indexer=_address(indexer) if indexer is not None else None,
        model=model,
        time_scale=_time_scale(load, clock),
        mode=mode,
        results=results,
    )
    run_statistics = run_interruptibly(replay_running(command, Console()))
    if run_statistics.errors or not run_statistics.valid:
        raise typer.Exit(1)


@app.command(
    "serve", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def serve_command(
    context: typer.Context,
    roles: Annotated[str, typer.Option(help="Services to run, separated by commas.")] = "frontend,scheduler,indexer",
) -> None:
    """Run several services in one process without sockets between them; takes the options of each."""
    from kvrouter.cli.serve import ROLES, serve  # the other commands start faster without all services

    chosen = [role.strip() for role in roles.split(",")]
    for role in chosen:
        if role not in ROLES:
            raise WrongUsage(f"role {role!r} is not known: {', '.join(ROLES)}")
    serve(chosen, context.args)


@app.command("explain")
def explain_command(
    which: Annotated[str, typer.Argument(help="Id of the request or of the decision.")],
    etcd: Etcd = DEFAULT_ETCD,
    namespace: Namespace = "kvrouter",
    scheduler: Schedulers = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Deadline of the whole command, in seconds.")] = 10.0,
) -> None:
    """Show why a request was sent to its rank, with the terms of every candidate."""
    run_interruptibly(explain(_where(etcd, namespace, scheduler), which, seconds))


@app.command("top")
def top_command(
    etcd: Etcd = DEFAULT_ETCD,
    namespace: Namespace = "kvrouter",
    scheduler: Schedulers = None,
    indexer: Annotated[
        list[str] | None, typer.Option(help="gRPC address of an Indexer, host:port, instead of discovery through etcd.")
    ] = None,
    frontend: Annotated[
        list[str] | None, typer.Option(help="gRPC address of a Frontend, host:port, instead of discovery through etcd.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Refresh interval, in seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame with every rank and exit.")] = False,
) -> None:
    """Show load, cache hits, event lag and the last decisions of a running system until Ctrl-C."""
    where = _where(etcd, namespace, scheduler, indexer, frontend)
    if once:
        run_interruptibly(top_once(where))
        return
    with suppress(Interrupted):  # the way in which it is meant to end
        run_interruptibly(top(where, interval))


app.command("simulate", short_help="Run any routing policy on simulated engines.")(simulate_command)


def main() -> None:
    """Entry point. Wrong usage is one line on stderr and exit status 2; what fails is one message and status 1."""
    status = 0
    try:
        status = app(standalone_mode=False) or 0
    except TraceError as error:
        status = _fail(str(error), WrongUsage.exit_code)
    except typer.TyperException as error:
        status = _fail(error.format_message(), error.exit_code)
    except Interrupted as error:
        status = error.exit_status
    except KeyboardInterrupt:  # the second Ctrl-C; children go with this process
        status = 130
    except (ProcessDied, StackFailed, StartFailed, BinaryMissing) as error:
        status = _fail(str(error), CommandFailed.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        status = _fail("a picture needs matplotlib: pip install 'kvrouter[stack]'", CommandFailed.exit_code)
    except OSError as error:
        status = _fail(reason_of(error), CommandFailed.exit_code)
    sys.exit(status)


def _fail(words: str, status: int) -> int:
    print(f"kvrouter: {words}", file=sys.stderr)  # noqa: T201
    return status


def _requests(trace: Path | None, limit: int | None, of_model: str | None = None) -> list[TraceRequest]:
    return read_shipped_trace(limit) if trace is None else read_trace(trace, limit, of_model)


def _time_scale(load: float, clock: float) -> TimeScale:
    try:
        return TimeScale(load, clock)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _modes(modes: list[str]) -> list[str]:
    for mode in modes:
        if mode not in NAMES:
            raise WrongUsage(f"mode {mode!r} is not known: {', '.join(NAMES)}")
    if len(set(modes)) != len(modes):
        raise WrongUsage("a mode is given twice")
    return modes


def _where(
    etcd: str,
    namespace: str,
    schedulers: list[str] | None,
    indexers: list[str] | None = None,
    frontends: list[str] | None = None,
) -> Where:
    if (indexers or frontends) and not schedulers:
        raise WrongUsage("--indexer and --frontend need --scheduler too; without any of them, etcd is used")
    try:
        parse_endpoints(etcd)
        check_name(namespace)
    except (InvalidEndpoint, InvalidName) as error:
        raise WrongUsage(str(error)) from None
    named = [[_address(each) for each in addresses or ()] for addresses in (schedulers, indexers, frontends)]
    return Where(named[0], named[1], etcd, namespace, named[2])


def _address(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WrongUsage(f"{text!r} is not an address: write host:port")
    return text


if __name__ == "__main__":
    main()
