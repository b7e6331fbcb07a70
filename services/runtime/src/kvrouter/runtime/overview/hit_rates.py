"""Computes hit rates over a time window from the totals that Schedulers report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvrouter.runtime.overview.system import Rank, System, name_of, rank_of
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import HitCounts

_Key = tuple[str, int, ComponentName, Rank]
"""(Scheduler, its start, component, rank). Totals of a restarted Scheduler start from 0."""
_Sums = tuple[int, int, int, int, int]
"""(prompt tokens, cached tokens, prompt tokens with a prediction, predicted tokens, tokens that some rank held)."""
_NONE: _Sums = (0, 0, 0, 0, 0)

_TOLERANCE = 0.1
"""The Scheduler's tolerance."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """Share of prompt tokens in a cache, 0 to 1; None without prompt tokens."""

    predicted: float | None = None
    found: float | None = None
    possible: float | None = None
    """Tokens the best rank held of each prompt, by the prediction; at least ``found``."""

    @property
    def differs(self) -> bool:
        """Whether both are known and are further apart than is normal."""
        known = self.predicted is not None and self.found is not None
        return known and abs((self.predicted or 0.0) - (self.found or 0.0)) > _TOLERANCE


class HitWindow:
    """Hit rates of every rank, over the requests that ended within a time window."""

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
        return {rank: _rate(sums) for rank, sums in self._added(component).items()}

    def rate(self, component: ComponentName) -> HitRate:
        """Returns the rate of all ranks of a component together."""
        total = _NONE
        for sums in self._added(component).values():
            total = _plus(total, sums)
        return _rate(total)

    def _added(self, component: ComponentName) -> dict[Rank, _Sums]:
        if not self._samples:
            return {}
        newest = self._samples[-1][1]
        oldest = self._samples[0][1] if self.spans else {}
        added: dict[Rank, _Sums] = {}
        for key, sums in newest.items():
            if key[2] != component:
                continue
            before = oldest.get(key, _NONE)
            # The totals of a rank that had left start from 0 again.
            restarted = any(old > new for old, new in zip(before, sums, strict=True))
            since = sums if restarted else _plus(sums, before, -1)
            added[key[3]] = _plus(added.get(key[3], _NONE), since)
        return added


def _sums(system: System) -> dict[_Key, _Sums]:
    return {
        (status.scheduler_id, status.started_unix_ns, name_of(each.component), rank_of(rank.rank)): _of(rank.cache_hits)
        for status in system.statuses
        for each in status.components
        for rank in each.ranks
    }


def _of(hit_rates: HitCounts) -> _Sums:
    return (
        hit_rates.prompt_tokens,
        hit_rates.cached_tokens,
        hit_rates.predicted_prompt_tokens,
        hit_rates.predicted_cached_tokens,
        hit_rates.reachable_cached_tokens,
    )


def _plus(sums: _Sums, others: _Sums, sign: int = 1) -> _Sums:
    a, b, c, d, e = (one + sign * other for one, other in zip(sums, others, strict=True))
    return (a, b, c, d, e)


def _rate(sums: _Sums) -> HitRate:
    prompt, cached, predicted_prompt, predicted, reachable = sums
    found = cached / prompt if prompt > 0 else None
    if predicted_prompt <= 0:
        return HitRate(found=found)
    # Requests without a prediction count in ``found`` only, so it may be the larger one.
    return HitRate(predicted / predicted_prompt, found, max(found or 0.0, reachable / predicted_prompt))
