"""Cache hits by rank: measured by workers, and predicted from the index.

A second check finds out whether workers report other numbers of cached tokens than were predicted.
Each window of time is judged by itself: the difference is the predicted minus the reported share of the prompt tokens,
over requests whose worker reported its cached tokens. It is persistent if two windows in succession exceed the
tolerance in the same direction. Windows with few requests have no result.

While workers lastingly reuse less than predicted, decisions count the measured share of predicted blocks: engines of
hybrid models reuse a prefix only as far as the blocks of every group of layers reach, and the index has one group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from kvrouter.core import Rank
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.scheduler_pb2 import HitCounts, TierTokens
from kvrouter.v1.texts import LOWER_TIER_NAMES, by_tier


def tier_tokens(counts: LowerTiers, block_size: int = 1) -> TierTokens:
    """Returns numbers of blocks by tier in tokens."""
    return TierTokens(**{tier: count * block_size for tier, count in by_tier(counts).items()})


@dataclass(slots=True)
class _Sums:
    """The fields of ``HitCounts``, which takes ten times as long to add to."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    reachable_cached_tokens: int = 0
    lower_cached_tokens: TierTokens | None = None
    predicted_lower_tokens: TierTokens | None = None

    def add(self, other: _Sums) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.predicted_prompt_tokens += other.predicted_prompt_tokens
        self.predicted_cached_tokens += other.predicted_cached_tokens
        self.reachable_cached_tokens += other.reachable_cached_tokens
        self.lower_cached_tokens = _sum(self.lower_cached_tokens, other.lower_cached_tokens)
        self.predicted_lower_tokens = _sum(self.predicted_lower_tokens, other.predicted_lower_tokens)


class CacheHits:
    """Sums over the requests of one component whose worker reported its cached tokens."""

    def __init__(self) -> None:
        self._sums: dict[Rank, _Sums] = {}
        self._of_left = _Sums()
        """The sums of ranks that have left."""

    def set_ranks(self, registered: Iterable[Rank]) -> None:
        """Replaces the registered ranks. The sums of all others count in ``total`` only."""
        kept = set(registered)
        for rank in self._sums.keys() - kept:
            self._of_left.add(self._sums.pop(rank))

    def add(
        self,
        rank: Rank,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        predicted_tokens: int | None,
        reachable_tokens: int = 0,
        lower_tokens: TierTokens | None = None,
        predicted_lower_tokens: TierTokens | None = None,
    ) -> None:
        """Adds an ended request.

        Args:
            rank: Its rank.
            prompt_tokens: Tokens of its prompt.
            cached_tokens: Tokens found in the worker's cache.
            predicted_tokens: Cached tokens predicted from the index; None without a prediction.
            reachable_tokens: The same for the rank with the largest overlap.
            lower_tokens: Those of ``cached_tokens`` from below device memory; None if there are none, or if unknown.
            predicted_lower_tokens: Those of ``predicted_tokens``; None if there are none.
        """
        sums = self._sums.get(rank)
        if sums is None:
            sums = self._sums[rank] = _Sums()
        sums.requests += 1
        sums.prompt_tokens += prompt_tokens
        sums.cached_tokens += cached_tokens
        if lower_tokens is not None:
            sums.lower_cached_tokens = _sum(sums.lower_cached_tokens, lower_tokens)
        if predicted_tokens is not None:
            sums.predicted_prompt_tokens += prompt_tokens
            sums.predicted_cached_tokens += predicted_tokens
            sums.reachable_cached_tokens += reachable_tokens
            if predicted_lower_tokens is not None:
                sums.predicted_lower_tokens = _sum(sums.predicted_lower_tokens, predicted_lower_tokens)

    def of(self, rank: Rank) -> HitCounts:
        """Returns the sums of one rank."""
        sums = self._sums.get(rank)
        return HitCounts() if sums is None else HitCounts(**asdict(sums))

    def total(self) -> HitCounts:
        """Returns the sums of all ranks, those that have left included."""
        total = replace(self._of_left)
        for sums in self._sums.values():
            total.add(sums)
        return HitCounts(**asdict(total))


def _sum(sums: TierTokens | None, tokens: TierTokens | None) -> TierTokens | None:
    if sums is None or tokens is None:
        return sums or tokens
    return TierTokens(**{tier: getattr(sums, tier) + getattr(tokens, tier) for tier in LOWER_TIER_NAMES})


WINDOW_SECONDS = 60.0
MIN_REQUESTS = 20
"""Minimum number of requests in a window, since single requests often differ."""
TOLERANCE = 0.1
"""Normal difference, as a share of the prompt tokens: events arrive late, and blocks are evicted meanwhile."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Shares of one window of time."""

    requests: int
    predicted: float
    """Predicted share of the prompt tokens, 0 to 1."""
    reported: float
    """Reported share of the prompt tokens, 0 to 1."""

    @property
    def direction(self) -> int:
        """1 if too much was predicted, -1 if too little, 0 within the tolerance."""
        difference = self.predicted - self.reported
        return 0 if abs(difference) <= TOLERANCE else 1 if difference > 0 else -1

    @property
    def advice(self) -> str:
        """Advice for operators."""
        if self.direction > 0:
            return (
                "Workers compute again what the index says they hold. Check with kvrouter index verify, and that the "
                "engines use their prefix caches and count cached tokens as prompt tokens that were not computed."
            )
        return (
            "Workers hold more than the index finds. Check that the Frontend has the tokenizer and chat template of "
            "the engine, that LoRA adapters and cache salts have equal names in events and requests, and that the "
            "Indexer does not lag."
        )


class PredictionCheck:
    """The windows of one component."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._requests = 0
        self._prompt = self._predicted = self._reported = 0
        self._previous_direction = 0
        self.reuse_ratio = 1.0
        """Share of predicted blocks to count, 0 to 1."""

    def add(self, *, prompt_tokens: int, predicted_tokens: int, reported_tokens: int) -> Difference | None:
        """Adds an ended request; returns a persistent difference, at most once for each window."""
        difference = self._close_window() if self._clock() - self._since >= WINDOW_SECONDS else None
        self._requests += 1
        self._prompt += prompt_tokens
        self._predicted += predicted_tokens
        self._reported += reported_tokens
        return difference

    def _close_window(self) -> Difference | None:
        window = Difference(
            self._requests, self._predicted / max(1, self._prompt), self._reported / max(1, self._prompt)
        )
        self._since = self._clock()
        self._requests = self._prompt = self._predicted = self._reported = 0
        if window.requests < MIN_REQUESTS:
            return None
        previous, self._previous_direction = self._previous_direction, window.direction
        is_persistent = bool(window.direction) and window.direction == previous
        overpredicts = is_persistent and window.direction > 0
        self.reuse_ratio = window.reported / window.predicted if overpredicts else 1.0
        return window if is_persistent else None
