"""The calls of ``kvrouter index …`` to an Indexer, and the tables of their results."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import cast

from google.protobuf.json_format import MessageToJson, Parse, ParseError
from kvrouter.cli.arguments import named_component
from kvrouter.cli.connections import open_service
from kvrouter.cli.errors import CommandFailed, WrongUsage
from kvrouter.cli.interrupts import run_interruptibly
from kvrouter.cli.terminal import SHORTENED, PlainConsole, may_stand_for
from kvrouter.runtime.contracts import SERVICES, Indexer
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1.common_pb2 import Component, Rank, RankState, Tier, Transport
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import (
    ComponentStats,
    DumpRequest,
    GetStatsRequest,
    GetStatsResponse,
    LoadRequest,
    RankStats,
    ResetStatesRequest,
    ResyncRequest,
    TakeSnapshotRequest,
    VerifyRequest,
    VerifyResponse,
)
from kvrouter.v1.pages import whole
from kvrouter.v1.texts import rank_text, text_of
from rich.table import Table

_SHOWN_DIFFERENCES = 32  # of each rank


class IndexerCalls:
    """Calls to an Indexer about one component. Each prints its result, and returns False to end with status 1."""

    def __init__(self, service: Indexer, component: str, deadline: Deadline) -> None:
        """Asks about a component, namespace/name; empty for the only one."""
        self._service = service
        self._component = component
        self._deadline = deadline

    async def status(self) -> bool:
        """Prints each component and its ranks."""
        request = GetStatsRequest(component=named_component(self._component)) if self._component else GetStatsRequest()
        answer = await self._stats(request)
        console = _console()
        bound = f" of at most {answer.max_index_bytes / 1e6:,.0f} MB" if answer.max_index_bytes else ""
        console.print(f"replica {answer.replica_id}, indexes of {answer.index_bytes / 1e6:,.0f} MB{bound}")
        for stats in answer.components:
            show_component(console, stats)
        return True

    async def dump(self, output: Path | None, ranks: Sequence[str] | None) -> bool:
        """Writes the index as JSON lines to a file, or to standard output."""
        named = await self._named()
        request = DumpRequest(component=named, ranks=await self._ranks(named, ranks))
        with output.open("w") if output is not None else sys.stdout as file:
            async with aclosing(self._service.dump(request, deadline=self._deadline)) as parts:
                async for part in parts:
                    file.write(MessageToJson(part.state, indent=None) + "\n")
        return True

    async def load(self, dumped: Path) -> bool:
        """Loads a dump."""
        named = await self._named()

        async def parts() -> AsyncIterator[LoadRequest]:
            with dumped.open() as lines:
                for number, line in enumerate(lines, start=1):
                    try:
                        state = Parse(line, RankState())
                    except ParseError as error:
                        raise CommandFailed(f"{dumped}, line {number}: {error}") from None
                    yield LoadRequest(component=named, state=state)

        answer = await self._service.load(parts(), deadline=self._deadline)
        _console().print(f"{answer.ranks} ranks, {answer.blocks} blocks loaded")
        return True

    async def verify(self, ranks: Sequence[str] | None) -> bool:
        """Compares the index with the workers' states, prints the result, and returns whether all are the same."""
        named = await self._named()
        table = Table("rank", "result", "in both", "missing", "surplus", "index at", "worker at")
        different = Table("rank", "block", "tier", "copies in the index", "on the worker")
        same, left_out = True, 0
        request = VerifyRequest(component=named, ranks=await self._ranks(named, ranks))
        async with aclosing(self._service.verify(request, deadline=self._deadline)) as answers:
            async for answer in answers:
                verdict, good = _verdict(answer)
                same = same and good
                who = rank_text(answer.rank)
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
                    counts = (str(each.index_copies), str(each.worker_copies))
                    different.add_row(who, f"{each.engine_hash:016x}", text_of(Tier, each.tier), *counts)
        _console().print(table)
        if different.row_count:
            _console().print(different)
        if left_out:
            _console().print(f"and {left_out} more")
        return same

    async def resync(self, ranks: Sequence[str] | None) -> bool:
        """Replaces ranks by their workers' states, and returns whether every worker answered."""
        named = await self._named()
        answer = await self._service.resync(
            ResyncRequest(component=named, ranks=await self._ranks(named, ranks)), deadline=self._deadline
        )
        _console().print(f"ranks replaced: {answer.ranks}, out of reach: {answer.unreachable}")
        return not answer.unreachable

    async def snapshot(self) -> bool:
        """Takes a snapshot."""
        named = await self._named()
        answer = await self._service.take_snapshot(TakeSnapshotRequest(component=named), deadline=self._deadline)
        _console().print(f"{answer.object_name}: {answer.blocks} blocks, up to message {answer.stream_sequence}")
        return True

    async def reset(self, *, even_if_others_live: bool) -> bool:
        """Deletes the stream's messages and all snapshots."""
        named = await self._named()
        request = ResetStatesRequest(component=named, even_if_others_live=even_if_others_live)
        answer = await self._service.reset_states(request, deadline=self._deadline)
        _console().print(f"dropped: messages {answer.messages}, snapshots {answer.snapshots}")
        return True

    async def _ranks(self, component: Component, texts: Sequence[str] | None) -> list[Rank]:
        """Returns the ranks that are named as WORKER_ID or WORKER_ID:DP_RANK, also as ``kvrouter top`` shortens them.

        Raises:
            WrongUsage: a name is malformed, or a shortened one stands for no rank or for several.
        """
        if not texts:
            return []
        known: list[Rank] = []
        if any(SHORTENED in text for text in texts):
            answer = await self._stats(GetStatsRequest(component=component))
            known = [rank.rank for stats in answer.components for rank in stats.ranks]
        return [rank_of_text(text, known) for text in texts]

    async def _stats(self, request: GetStatsRequest) -> GetStatsResponse:
        """Returns all pages of the statistics."""
        return await whole(partial(self._service.get_stats, deadline=self._deadline), request)

    async def _named(self) -> Component:
        """Returns the named component, or the only one."""
        if self._component:
            return named_component(self._component)
        answer = await self._stats(GetStatsRequest())
        known = [stats.component for stats in answer.components]
        if len(known) != 1:
            names = ", ".join(f"{each.namespace}/{each.name}" for each in known) or "none"
            raise WrongUsage(f"expected a component to be named: the Indexer has {names}")
        return known[0]


def ask_indexer(
    address: str, component: str, seconds: float, question: Callable[[IndexerCalls], Awaitable[bool]]
) -> bool:
    """Asks the Indexer at an address (host:port), within a number of seconds.

    Raises:
        WrongUsage: the component is not named although there are several, or a name is malformed.
        CommandFailed: the Indexer does not answer, or refuses.
    """

    async def ask() -> bool:
        async with open_service(address, "indexer") as channel:
            service = cast(Indexer, remote(SERVICES["indexer"], channel))
            return await question(IndexerCalls(service, component, Deadline.after(seconds)))

    try:
        return run_interruptibly(ask())
    except KvRouterError as error:
        raise CommandFailed(str(error)) from None


def _console() -> PlainConsole:
    """Returns the console for results. In a pipe or a file, no line is wrapped at a terminal's width."""
    return PlainConsole(None if sys.stdout.isatty() else 200)


def rank_of_text(text: str, known: Sequence[Rank]) -> Rank:
    """Returns the rank that WORKER_ID or WORKER_ID:DP_RANK names, among those that are known if it is shortened.

    Raises:
        WrongUsage: it is malformed, or is short for no worker or for several.
    """
    worker, _, dp_rank = text.partition(":")
    if SHORTENED in worker:
        found = {str(rank.worker_id) for rank in known if may_stand_for(worker, str(rank.worker_id))}
        if len(found) != 1:
            raise WrongUsage(f"{worker} stands for {', '.join(sorted(found)) or 'no worker of the index'}")
        (worker,) = found
    try:
        return Rank(worker_id=int(worker), dp_rank=int(dp_rank or 0))
    except ValueError:
        raise WrongUsage(f"expected WORKER_ID or WORKER_ID:DP_RANK, received {text!r}") from None


def _verdict(answer: VerifyResponse) -> tuple[str, bool]:
    if not answer.compared:
        return "no answer", False
    if answer.missing_blocks or answer.surplus_blocks:
        return "differs", False
    return "same", True


_RANK_COLUMNS = (
    *("rank", "incarnation", "next event", "blocks", "MB"),
    *("drifts", "state", "last resync", "events", "evidence"),
)


def show_component(console: PlainConsole, stats: ComponentStats) -> None:
    """Prints a component and its ranks."""
    name = f"{stats.component.namespace}/{stats.component.name}"
    lag = stats.last_stream_sequence - min(stats.applied_stream_sequence, stats.last_stream_sequence)
    taken = (
        f"up to message {stats.snapshot_sequence}, {stats.snapshot_age_ms / 1000:.0f} s old"
        if "snapshot_age_ms" in stats
        else "none"
    )
    console.print(f"\n{name}: {'ready' if stats.ready else 'restoring'}, transport {_transport(stats.transport)}")
    console.print(f"  {stats.blocks} blocks, {stats.memory_bytes / 1e6:.1f} MB; snapshot {taken}")
    console.print(
        f"  lag {lag} messages (stream checked: {_age(stats, 'stream_checked_age_ms')}), "
        f"{stats.lag_us / 1e6:.3f} s of the newest batch; {stats.events.repairs} ranks dropped so far"
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
            rank_text(rank.rank),
            str(rank.cursor.incarnation),
            str(rank.cursor.next_event_id),
            str(rank.blocks),
            f"{rank.memory_bytes / 1e6:.2f}",
            str(rank.drifts),
            _state(rank),
            _resync(rank),
            _transport(rank.transport),
            _age(rank, "evidence_age_ms"),
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
    return f"{state}, no heartbeat for {_age(rank, 'heard_age_ms', ago=False)}" if rank.silent else state


def _age(message: ComponentStats | RankStats, field: str, *, ago: bool = True) -> str:
    if field not in message:
        return "never"
    return f"{getattr(message, field) / 1000:.0f} s{' ago' if ago else ''}"


def _resync(rank: RankStats) -> str:
    """Returns the repair that is due or running for a rank, otherwise its last resync."""
    if "repair" not in rank:
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
    return text_of(Transport, transport) if transport else "-"
