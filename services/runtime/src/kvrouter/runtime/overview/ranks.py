"""What is shown of a rank: its hit rates over a time window, and its unusual states in a few words."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from kvrouter.runtime.overview.system import Rank, System, name_of, rank_of
from kvrouter.v1.frontend_pb2 import WorkerHealth, WorkerHealthState
from kvrouter.v1.indexer_pb2 import RankStats
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ComponentStatus, HitCounts, RankStatus

_Key = tuple[str, int, ComponentName, Rank | None]
"""(Scheduler, its start, component, rank), without a rank for sums of the component. Totals of a restarted Scheduler
start from 0."""
_Sums = tuple[int, ...]
"""Prompt tokens, cached tokens, prompt tokens with a prediction, predicted tokens, tokens that some rank held; cached
tokens and predicted ones by tier below device memory."""
TIERS = {"host": "in host memory", "disk": "on disk", "shared": "in shared storage"}
"""Tiers below device memory, each as it is shown."""
_by_tier = attrgetter(*TIERS)
_NONE: _Sums = (0,) * (5 + 2 * len(TIERS))

_TOLERANCE = 0.1
"""The Scheduler's tolerance."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """Share of prompt tokens in a cache, 0 to 1; None without prompt tokens."""

    predicted: float | None = None
    found: float | None = None
    possible: float | None = None
    """Tokens the best rank held of each prompt, by the prediction; at least ``found``."""

    lower_found: Mapping[str, float] = field(default_factory=dict)
    """The share of each tier below device memory in ``found``, if there are such tokens."""
    lower_predicted: Mapping[str, float] = field(default_factory=dict)
    """The same in ``predicted``."""

    @property
    def tiers(self) -> str:
        """Says how much was found in which tier below device memory; empty if nothing was."""
        return ", ".join(
            f"{self.lower_found.get(tier, 0.0):.0%} {place} ({self.lower_predicted.get(tier, 0.0):.0%} predicted)"
            for tier, place in TIERS.items()
            if tier in self.lower_found or tier in self.lower_predicted
        )

    @property
    def differs(self) -> bool:
        """Whether both are known and are further apart than is normal."""
        known = self.predicted is not None and self.found is not None
        return known and abs((self.predicted or 0.0) - (self.found or 0.0)) > _TOLERANCE


class HitWindow:
    """Hit rates of components and of the ranks in its samples, over the requests that ended within a time window."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._samples: deque[tuple[float, dict[_Key, _Sums]]] = deque()

    @property
    def spans(self) -> bool:
        """Whether there are two samples. With one, rates cover everything the Schedulers have counted."""
        return len(self._samples) > 1

    def take(self, system: System, now: float) -> None:
        """Adds a sample with its time, in seconds of a monotonic clock."""
        self._samples.append((now, _sums(system)))
        # The window starts at the last sample before it.
        while len(self._samples) > 1 and self._samples[1][0] <= now - self.seconds:
            self._samples.popleft()

    def rates(self, component: ComponentName) -> dict[Rank, HitRate]:
        """Returns the rates of a component's ranks, over all Schedulers."""
        return {rank: _rate(sums) for rank, sums in self._added(component).items() if rank is not None}

    def rate(self, component: ComponentName) -> HitRate:
        """Returns the rate of a component."""
        total = _NONE
        for sums in self._added(component).values():
            total = _plus(total, sums)
        return _rate(total)

    def _added(self, component: ComponentName) -> dict[Rank | None, _Sums]:
        if not self._samples:
            return {}
        newest = self._samples[-1][1]
        oldest = self._samples[0][1] if self.spans else {}
        added: dict[Rank | None, _Sums] = {}
        for key, sums in newest.items():
            if key[2] != component:
                continue
            added[key[3]] = _plus(added.get(key[3], _NONE), increase(oldest.get(key, _NONE), sums))
        return added


def increase(before: Sequence[int], now: Sequence[int]) -> tuple[int, ...]:
    """Returns how much counts have grown.

    If one is lower than before, they have started from 0 again, as those of a rank that had left.
    """
    restarted = any(old > new for old, new in zip(before, now, strict=True))
    return tuple(now) if restarted else tuple(new - old for old, new in zip(before, now, strict=True))


def _sums(system: System) -> dict[_Key, _Sums]:
    sums: dict[_Key, _Sums] = {}
    for status in system.statuses:
        for each in status.components:
            key = status.scheduler_id, status.started_unix_ns, name_of(each.component)
            if "sums" in each:
                sums[*key, None] = _of(each.sums.cache_hits)
            sums.update(((*key, rank_of(rank.rank)), _of(rank.cache_hits)) for rank in each.ranks)
    return sums


def _of(hit_rates: HitCounts) -> _Sums:
    return (
        hit_rates.prompt_tokens,
        hit_rates.cached_tokens,
        hit_rates.predicted_prompt_tokens,
        hit_rates.predicted_cached_tokens,
        hit_rates.reachable_cached_tokens,
        *_by_tier(hit_rates.lower_cached_tokens),
        *_by_tier(hit_rates.predicted_lower_tokens),
    )


def _plus(sums: _Sums, others: _Sums) -> _Sums:
    return tuple(one + other for one, other in zip(sums, others, strict=True))


def _rate(sums: _Sums) -> HitRate:
    prompt, cached, predicted_prompt, predicted, reachable, *lower = sums
    found, lower_found = cached / prompt if prompt > 0 else None, _shares(lower[: len(TIERS)], prompt)
    if predicted_prompt <= 0:
        return HitRate(found=found, lower_found=lower_found)
    # Requests without a prediction count in ``found`` only, so it may be the larger one.
    possible = max(found or 0.0, reachable / predicted_prompt)
    lower_predicted = _shares(lower[len(TIERS) :], predicted_prompt)
    return HitRate(predicted / predicted_prompt, found, possible, lower_found, lower_predicted)


def _shares(tokens: Sequence[int], of: int) -> dict[str, float]:
    return {tier: count / of for tier, count in zip(TIERS, tokens, strict=True) if count}


def reuse_note(status: ComponentStatus) -> str:
    """Says that decisions count less than is predicted; empty if they do not."""
    if "reuse_ratio" not in status or status.reuse_ratio >= 1:
        return ""
    return f"decisions count {status.reuse_ratio:.0%} of predicted blocks, since workers reuse no more"


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
    if "report_age_ms" in rank and "reported" not in rank:
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
        heard = f"for {duration(stats.heard_age_ms / 1000)}" if "heard_age_ms" in stats else "yet"
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
