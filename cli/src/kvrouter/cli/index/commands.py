"""Declares the commands of ``kvrouter index``; they import their implementation when they run."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from kvrouter.cli.errors import WrongUsage
from kvrouter.cli.running import Run, chosen_system

if TYPE_CHECKING:
    from kvrouter.cli.index.calls import IndexerCalls

index_app = typer.Typer(help="Ask an Indexer what it knows, and correct it.", no_args_is_help=True)

Address = Annotated[
    str | None,
    typer.Option(
        "--indexer",
        help="gRPC address of the Indexer, host:port; by default of the system that up or serve runs on this machine.",
    ),
]
Named = Annotated[str, typer.Argument(help="Component as namespace/name; needed only if there are several.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Deadline of the whole command, in seconds.")]
Ranks = Annotated[
    list[str] | None, typer.Option("--rank", help="Rank as WORKER_ID or WORKER_ID:DP_RANK; all by default.")
]

_Question = Callable[["IndexerCalls"], Awaitable[bool]]


def _options(indexer: Address = None, run: Run = None, component: Named = "", seconds: Seconds = 120.0) -> None:
    """Has the options of every command."""


def _command(function: Callable[..., _Question]) -> None:
    """Registers a command by the function's name, with its own options and those of every command that it lacks.

    The function returns the question to ask. The exit status is 1 if the answer is False.
    """

    def ask(indexer: str | None, run: str | None, component: str, seconds: float, **own: Any) -> None:
        from kvrouter.cli.index.calls import ask_indexer

        if not ask_indexer(_address(indexer, run), component, seconds, function(**own)):
            raise typer.Exit(1)

    own, shared = (dict(inspect.signature(each, eval_str=True).parameters) for each in (function, _options))
    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (own | shared | own).values()]
    ask.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    ask.__annotations__ = {each.name: each.annotation for each in parameters}
    index_app.command(function.__name__, help=inspect.getdoc(function))(ask)


@_command
def status(seconds: Seconds = 10.0) -> _Question:  # noqa: ARG001 - `ask` takes it; the default is shorter
    """Show transport, lag and snapshot of each component, and cursor, blocks and state of each rank."""
    return lambda calls: calls.status()


@_command
def dump(
    output: Annotated[Path | None, typer.Option(help="File to write; standard output by default.")] = None,
    rank: Ranks = None,
) -> _Question:
    """Write the index as JSON lines."""
    return lambda calls: calls.dump(output, rank)


@_command
def load(dumped: Annotated[Path, typer.Argument(help="File written by `kvrouter index dump`.")]) -> _Question:
    """Load a dump; each rank replaces the index's own unless that is ahead of it."""
    return lambda calls: calls.load(dumped)


@_command
def verify(rank: Ranks = None) -> _Question:
    """Compare the index with the workers' own states; exit status 1 if a rank differs."""
    return lambda calls: calls.verify(rank)


@_command
def resync(rank: Ranks = None) -> _Question:
    """Replace ranks by their workers' states; exit status 1 if a worker does not answer."""
    return lambda calls: calls.resync(rank)


@_command
def snapshot() -> _Question:
    """Take a snapshot now."""
    return lambda calls: calls.snapshot()


@_command
def reset(
    even_if_others_live: Annotated[bool, typer.Option(help="Continue although another replica is live.")] = False,
) -> _Question:
    """Delete the stream's messages and all snapshots, and refill the index from live workers."""
    return lambda calls: calls.reset(even_if_others_live=even_if_others_live)


def _address(indexer: str | None, run: str | None) -> str:
    system = chosen_system(run, addresses={"--indexer": indexer})
    address = indexer or (system.indexer if system is not None else "")
    if not address:
        raise WrongUsage("no system with an Indexer runs here: name its gRPC address with --indexer")
    return address
