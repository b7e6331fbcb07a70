"""How hit rate and load developed over the last hour, sampled at even intervals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvrouter.runtime.overview.system import System

INTERVAL_SECONDS = 10.0
_SAMPLES = 360

_Key = tuple[str, int, str, int, int]
"""(Scheduler, its start, component, worker, rank)."""
_Counts = tuple[int, int, int, int, int]
"""(requests, prompt tokens, cached tokens, prompt tokens with a prediction, tokens that some rank held)."""


@dataclass(frozen=True, slots=True)
class Point:
    """The events of one interval."""

    at: float
    """Unix time of its end, seconds."""
    requests: int
    """Requests that ended, of those whose worker reported its cached tokens."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in a cache, and so did not have to be computed."""
    predicted_prompt_tokens: int
    """Prompt tokens of the requests whose cached tokens were predicted."""
    reachable_tokens: int
    """Tokens of these in the cache of the rank that held most of the prompt."""
    active_requests: int
    """Booked requests at its end."""
    active_share: float | None
    """KV blocks of booked requests over all KV blocks, 0 to 1; None if no rank says how many it has."""


class History:
    """Points of the last hour. Pure: samples are given to it."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=_SAMPLES)
        self._before: dict[_Key, _Counts] | None = None

    @property
    def points(self) -> list[Point]:
        """The points, oldest first."""
        return list(self._points)

    def take(self, system: System) -> None:
        """Adds a point for the time since the previous sample. The first sample only sets the counts."""
        counts = _counts(system)
        if self._before is not None:
            ranks = [rank for _, status in system.components().values() for rank in status.ranks]
            blocks = sum(rank.total_blocks for rank in ranks)
            point = Point(
                system.at.timestamp(),
                *_since(self._before, counts),
                active_requests=sum(rank.active_requests for rank in ranks),
                active_share=sum(rank.active_blocks for rank in ranks) / blocks if blocks else None,
            )
            self._points.append(point)
        if counts or self._before is None:
            # While no Scheduler answers, the former counts stay, so that what happened meanwhile is not lost.
            self._before = counts


def _counts(system: System) -> dict[_Key, _Counts]:
    return {
        (status.scheduler_id, status.started_unix_ns, each.component.name, rank.rank.worker_id, rank.rank.dp_rank): (
            hits.requests,
            hits.prompt_tokens,
            hits.cached_tokens,
            hits.predicted_prompt_tokens,
            hits.reachable_cached_tokens,
        )
        for status in system.statuses
        for each in status.components
        for rank in each.ranks
        for hits in (rank.cache_hits,)
    }


def _since(before: dict[_Key, _Counts], now: dict[_Key, _Counts]) -> _Counts:
    nothing: _Counts = (0, 0, 0, 0, 0)
    total = nothing
    for key, counts in now.items():
        old = before.get(key, nothing)
        # The counts of a rank that had left start from 0 again.
        start = old if all(o <= c for o, c in zip(old, counts, strict=True)) else nothing
        a, b, c, d, e = (sum_ + new - first for sum_, new, first in zip(total, counts, start, strict=True))
        total = (a, b, c, d, e)
    return total
