"""Prints what an Indexer reports about its components and ranks."""

from __future__ import annotations

import time

from kvrouter.cli.terminal import PlainConsole
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.indexer_pb2 import ComponentStats, RankStats
from rich.table import Table

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
        if stats.HasField("snapshot_age_ms")
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
            f"{rank.rank.worker_id}:{rank.rank.dp_rank}",
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
    if not message.HasField(field):
        return "never"
    return f"{getattr(message, field) / 1000:.0f} s{' ago' if ago else ''}"


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
