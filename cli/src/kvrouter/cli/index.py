"""``kvrouter index …``: inspects and corrects the index of an Indexer."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, TypeVar, cast

import typer
from google.protobuf.json_format import MessageToJson, Parse, ParseError
from kvrouter.cli.component_names import named_component
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.cli.running import Run, chosen_system
from kvrouter.cli.services import open_service
from kvrouter.cli.terminal import PlainConsole
from kvrouter.runtime.contracts import Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component, Rank, Tier, Transport
from kvrouter.v1.indexer_pb2 import (
    ComponentStats,
    DumpRequest,
    GetStatsRequest,
    LoadRequest,
    RankState,
    RankStats,
    ResetStatesRequest,
    ResyncRequest,
    TakeSnapshotRequest,
    VerifyRequest,
    VerifyResponse,
)
from rich.table import Table

T = TypeVar("T")

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
Workers = Annotated[
    list[str] | None, typer.Option("--rank", help="Rank as WORKER_ID or WORKER_ID:DP_RANK; all by default.")
]

_DEFAULT_SECONDS = 120.0
_SHOWN_DIFFERENCES = 32  # of each rank
_RANK_COLUMNS = (
    *("rank", "incarnation", "next event", "blocks", "MB"),
    *("drifts", "state", "last resync", "events", "evidence"),
)


@index_app.command("status")
def status(indexer: Address = None, run: Run = None, component: Named = "", seconds: Seconds = 10.0) -> None:
    """Show transport, lag and snapshot of each component, and cursor, blocks and state of each rank."""

    async def show(service: Indexer, deadline: Deadline) -> None:
        request = GetStatsRequest(component=named_component(component)) if component else GetStatsRequest()
        answer = await service.get_stats(request, deadline=deadline)
        console = _console()
        bound = f" of at most {answer.max_index_bytes / 1e6:,.0f} MB" if answer.max_index_bytes else ""
        console.print(f"replica {answer.replica_id}, indexes of {answer.index_bytes / 1e6:,.0f} MB{bound}")
        for stats in answer.components:
            _show_component(console, stats)

    _ask(_address(indexer, run), seconds, show)


@index_app.command("dump")
def dump(
    indexer: Address = None,
    run: Run = None,
    component: Named = "",
    output: Annotated[Path | None, typer.Option(help="File to write; standard output by default.")] = None,
    rank: Workers = None,
    seconds: Seconds = _DEFAULT_SECONDS,
) -> None:
    """Write the index as JSON lines."""

    async def write(service: Indexer, deadline: Deadline) -> None:
        named = await _named(service, component, deadline)
        request = DumpRequest(component=named, ranks=_ranks(rank))
        with output.open("w") if output is not None else sys.stdout as file:
            async with aclosing(service.dump(request, deadline=deadline)) as parts:
                async for part in parts:
                    file.write(MessageToJson(part.state, indent=None) + "\n")

    _ask(_address(indexer, run), seconds, write)


@index_app.command("load")
def load(
    dumped: Annotated[Path, typer.Argument(help="File written by `kvrouter index dump`.")],
    indexer: Address = None,
    run: Run = None,
    component: Named = "",
    seconds: Seconds = _DEFAULT_SECONDS,
) -> None:
    """Load a dump; each rank replaces the index's own unless that is ahead of it."""

    async def send(service: Indexer, deadline: Deadline) -> None:
        named = await _named(service, component, deadline)

        async def parts() -> AsyncIterator[LoadRequest]:
            with dumped.open() as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        state = Parse(line, RankState())
                    except ParseError as error:
                        raise CommandFailed(f"{dumped}, line {number}: {error}") from None
                    yield LoadRequest(component=named, state=state)

        answer = await service.load(parts(), deadline=deadline)
        _console().print(f"{answer.ranks} ranks, {answer.blocks} blocks loaded")

    _ask(_address(indexer, run), seconds, send)


@index_app.command("verify")
def verify(
    indexer: Address = None,
    run: Run = None,
    component: Named = "",
    rank: Workers = None,
    seconds: Seconds = _DEFAULT_SECONDS,
) -> None:
    """Compare the index with the workers' own states; exit status 1 if a rank differs."""

    async def compare(service: Indexer, deadline: Deadline) -> bool:
        named = await _named(service, component, deadline)
        table = Table("rank", "result", "in both", "missing", "surplus", "index at", "worker at")
        different = Table("rank", "block", "tier", "copies in the index", "on the worker")
        same, left_out = True, 0
        request = VerifyRequest(component=named, ranks=_ranks(rank))
        async with aclosing(service.verify(request, deadline=deadline)) as answers:
            async for answer in answers:
                verdict, good = _verdict(answer)
                same = same and good
                who = f"{answer.rank.worker_id}:{answer.rank.dp_rank}"
                table.add_row(
                    who,
                    verdict,
                    *(str(n) for n in (answer.common_blocks, answer.missing_blocks, answer.surplus_blocks)),
                    str(answer.index_cursor.next_event_id),
                    str(answer.worker_cursor.next_event_id),
                )
                shown = answer.differences[:_SHOWN_DIFFERENCES]
                left_out += len(answer.differences) - len(shown)
                for each in shown:
                    tier = Tier.Name(each.tier).removeprefix("TIER_").lower()
                    counts = (str(each.index_copies), str(each.worker_copies))
                    different.add_row(who, f"{each.engine_hash:016x}", tier, *counts)
        _console().print(table)
        if different.row_count:
            _console().print(different)
        if left_out:
            _console().print(f"and {left_out} more")
        return same

    if not _ask(_address(indexer, run), seconds, compare):
        raise typer.Exit(1)


@index_app.command("resync")
def resync(
    indexer: Address = None,
    run: Run = None,
    component: Named = "",
    rank: Workers = None,
    seconds: Seconds = _DEFAULT_SECONDS,
) -> None:
    """Replace ranks by their workers' states; exit status 1 if a worker does not answer."""

    async def replace(service: Indexer, deadline: Deadline) -> bool:
        named = await _named(service, component, deadline)
        answer = await service.resync(ResyncRequest(component=named, ranks=_ranks(rank)), deadline=deadline)
        _console().print(f"ranks replaced: {answer.ranks}, out of reach: {answer.unreachable}")
        return not answer.unreachable

    if not _ask(_address(indexer, run), seconds, replace):
        raise typer.Exit(1)


@index_app.command("snapshot")
def snapshot(
    indexer: Address = None, run: Run = None, component: Named = "", seconds: Seconds = _DEFAULT_SECONDS
) -> None:
    """Take a snapshot now."""

    async def take(service: Indexer, deadline: Deadline) -> None:
        named = await _named(service, component, deadline)
        answer = await service.take_snapshot(TakeSnapshotRequest(component=named), deadline=deadline)
        _console().print(f"{answer.object_name}: {answer.blocks} blocks, up to message {answer.stream_sequence}")

    _ask(_address(indexer, run), seconds, take)


@index_app.command("reset")
def reset(
    indexer: Address = None,
    run: Run = None,
    component: Named = "",
    even_if_others_live: Annotated[bool, typer.Option(help="Continue although another replica is live.")] = False,
    seconds: Seconds = _DEFAULT_SECONDS,
) -> None:
    """Delete the stream's messages and all snapshots, and refill the index from live workers."""

    async def drop(service: Indexer, deadline: Deadline) -> None:
        named = await _named(service, component, deadline)
        request = ResetStatesRequest(component=named, even_if_others_live=even_if_others_live)
        answer = await service.reset_states(request, deadline=deadline)
        _console().print(f"dropped: messages {answer.messages}, snapshots {answer.snapshots}")

    _ask(_address(indexer, run), seconds, drop)


def _address(indexer: str | None, run: str | None) -> str:
    system = chosen_system(run, addresses={"--indexer": indexer})
    address = indexer or (system.indexer if system is not None else "")
    if not address:
        raise WrongUsage("no system with an Indexer runs here: name its gRPC address with --indexer")
    return address


def _console() -> PlainConsole:
    """Returns the console for results. In a pipe or a file, no line is wrapped at a terminal's width."""
    return PlainConsole(None if sys.stdout.isatty() else 200)


def _ask(address: str, seconds: float, question: Callable[[Indexer, Deadline], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with open_service(address, "indexer") as channel:
            service = cast(Indexer, remote(indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"], channel))
            return await question(service, Deadline.after(seconds))

    try:
        return run_interruptibly(ask())
    except KvRouterError as error:
        raise CommandFailed(error.shown_message) from None


async def _named(service: Indexer, text: str, deadline: Deadline) -> Component:
    """Returns the named component, or the only one."""
    if text:
        return named_component(text)
    known = [stats.component for stats in (await service.get_stats(GetStatsRequest(), deadline=deadline)).components]
    if len(known) != 1:
        names = ", ".join(f"{each.namespace}/{each.name}" for each in known) or "none"
        raise WrongUsage(f"expected a component to be named: the Indexer has {names}")
    return known[0]


def _ranks(texts: list[str] | None) -> list[Rank]:
    ranks = []
    for text in texts or []:
        worker, _, dp_rank = text.partition(":")
        try:
            ranks.append(Rank(worker_id=int(worker), dp_rank=int(dp_rank or 0)))
        except ValueError:
            raise WrongUsage(f"expected WORKER_ID or WORKER_ID:DP_RANK, received {text!r}") from None
    return ranks


def _verdict(answer: VerifyResponse) -> tuple[str, bool]:
    if not answer.compared:
        return "no answer", False
    if answer.missing_blocks or answer.surplus_blocks:
        return "differs", False
    return "same", True


def _show_component(console: PlainConsole, stats: ComponentStats) -> None:
    name = f"{stats.component.namespace}/{stats.component.name}"
    lag = stats.last_stream_sequence - min(stats.applied_stream_sequence, stats.last_stream_sequence)
    taken = (
        f"up to message {stats.snapshot_sequence}, {stats.snapshot_age_seconds:.0f} s old"
        if stats.snapshot_age_seconds
        else "none"
    )
    console.print(f"\n{name}: {'ready' if stats.ready else 'restoring'}, transport {_transport(stats.transport)}")
    console.print(f"  {stats.blocks} blocks, {stats.memory_bytes / 1e6:.1f} MB; snapshot {taken}")
    console.print(
        f"  lag {lag} messages (stream checked: {_age(stats, 'stream_checked_age_seconds')}), "
        f"{stats.lag_seconds:.3f} s of the newest batch; {stats.events.repairs} ranks dropped so far"
    )
    if stats.stream_error:
        console.print(f"  the stream takes no messages: {stats.stream_error}", style="red")
    if stats.events.evictions:
        console.print(f"  {stats.events.evictions} times a rank was emptied because the index exceeded its bound")
    if stats.events.unconfirmed:
        console.print(f"  {stats.events.unconfirmed} events dropped: their workers do not confirm them")
    table = Table(*_RANK_COLUMNS)
    for rank in stats.ranks:
        table.add_row(
            f"{rank.rank.worker_id}:{rank.rank.dp_rank}",
            str(rank.cursor.incarnation),
            str(rank.cursor.next_event_id),
            str(rank.blocks),
            f"{rank.memory_bytes / 1e6:.2f}",
            str(rank.drifts),
            _state(rank),
            _resync(rank),
            _transport(rank.transport),
            _age(rank, "evidence_age_seconds"),
        )
    console.print(table)


def _state(rank: RankStats) -> str:
    if rank.evicted:
        state = "evicted"
    elif rank.partial:
        state = "partial"
    elif rank.stale:
        state = "stale"
    else:
        state = "verified" if rank.verified else "unverified"
    if not rank.registered:
        return f"{state}, gone"
    return f"{state}, no heartbeat for {_age(rank, 'heard_age_seconds', ago=False)}" if rank.silent else state


def _age(message: ComponentStats | RankStats, field: str, *, ago: bool = True) -> str:
    if not message.HasField(field):
        return "never"
    return f"{getattr(message, field):.0f} s{' ago' if ago else ''}"


def _resync(rank: RankStats) -> str:
    """Returns the repair that is due or running for a rank, otherwise its last resync."""
    if not rank.HasField("repair"):
        return _last_resync(rank)
    repair = rank.repair
    if repair.under_way:
        return f"{repair.reason}: asking the worker"
    return f"{repair.reason}: backing off after {repair.attempts}" if repair.attempts else f"{repair.reason}: due"


def _last_resync(rank: RankStats) -> str:
    if not rank.resynced_unix_ns:
        return "never"
    return f"{rank.resync_reason}, {max(0.0, time.time() - rank.resynced_unix_ns / 1e9):.0f} s ago"


def _transport(transport: Transport) -> str:
    return Transport.Name(transport).removeprefix("TRANSPORT_").lower() if transport else "-"
