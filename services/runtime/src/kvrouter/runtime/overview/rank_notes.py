"""Unusual states of a rank, in a few words each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvrouter.v1.frontend_pb2 import WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import RankStats
from kvrouter.v1.scheduler_pb2 import RankStatus

BACKED_OFF = (WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF, WorkerHealthState.WORKER_HEALTH_STATE_HALF_OPEN)
"""States of workers whose requests have failed."""
_HEALTH = (
    ("lost", (WorkerHealthState.WORKER_HEALTH_STATE_LOST,)),
    ("suspected", (WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED,)),
    ("stalled", (WorkerHealthState.WORKER_HEALTH_STATE_STALLED,)),
    ("backed off", BACKED_OFF),
)
_SLOW = 1.25
"""Relative latency from which a rank is slow."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something unusual about a rank, in English."""

    severity: Literal["error", "warning"]
    what: str


def rank_notes(
    rank: RankStatus, stats: RankStats | None, health: Sequence[WorkerHealth], *, is_indexed: bool
) -> list[Note]:
    """Returns the unusual states of a rank; none if all is well.

    Args:
        rank: The rank as its Scheduler sees it.
        stats: The rank as an Indexer sees it; None if no Indexer does.
        health: Its worker as each Frontend sees it.
        is_indexed: Whether an Indexer knows the ranks of its component that publish events.
    """
    notes = [*_of_health(health), *_of_load(rank)]
    if stats is not None:
        notes.extend(_of_index(stats))
    elif is_indexed and rank.registered:
        notes.append(Note("warning", "no KV events: its cache is predicted"))
    return notes


def _of_health(health: Sequence[WorkerHealth]) -> Iterator[Note]:
    for words, states in _HEALTH:
        by = [each for each in health if each.state in states]
        if by:
            count = f" by {len(by)} of {len(health)} Frontends" if len(health) > 1 else ""
            cause = max(by, key=lambda each: each.consecutive_failures).last_failure if states is BACKED_OFF else ""
            yield Note("error", f"{words}{count}{': ' if cause else ''}{cause}")
    if difference := next((each.prompt_difference for each in health if each.prompt_difference), ""):
        yield Note("warning", f"chats have other tokens at the engine: {difference}")


def _of_load(rank: RankStatus) -> Iterator[Note]:
    if not rank.registered:
        yield Note("error", "gone, with bookings")
    if rank.draining:
        yield Note("warning", "draining")
    if rank.relative_latency >= _SLOW:
        yield Note("warning", f"{rank.relative_latency:.1f} times as slow")
    if rank.busy:
        yield Note("error", rank.busy)
    if rank.HasField("report_age_ms") and not rank.HasField("reported"):
        yield Note("warning", f"no load report for {duration(rank.report_age_ms / 1000)}")


def _of_index(stats: RankStats) -> Iterator[Note]:
    if stats.evicted:
        yield Note("warning", "evicted from the index")
    if stats.partial:
        yield Note("warning", "index partial")
    elif stats.stale:
        yield Note("error", f"index stale for {duration(stats.evidence_age_ms / 1000)}")
    elif not stats.verified:
        yield Note("warning", "index not compared")
    if stats.silent:
        heard = f"for {duration(stats.heard_age_ms / 1000)}" if stats.HasField("heard_age_ms") else "yet"
        yield Note("error", f"no heartbeat {heard}")


_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def duration(seconds: float) -> str:
    """Formats a time: ``3 ms``, ``1.2 s``, ``48 s``, ``5 min``, ``3.5 h``, ``12 d``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < _DAY else f"{seconds / _DAY:.0f} d"
