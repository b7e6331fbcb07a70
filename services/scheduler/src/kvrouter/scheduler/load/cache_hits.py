"""Cache hits by rank: measured by workers, and predicted from the index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvrouter.core import Rank
from kvrouter.v1.scheduler_pb2 import HitCounts


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_prompt_tokens: int = 0
    predicted_cached_tokens: int = 0
    reachable_cached_tokens: int = 0


class CacheHits:
    """Sums over the requests of one component whose worker reported its cached tokens."""

    def __init__(self) -> None:
        self._counts: dict[Rank, _Counts] = {}

    def set_ranks(self, registered: Iterable[Rank]) -> None:
        """Replaces the registered ranks and forgets all others."""
        kept = set(registered)
        self._counts = {rank: counts for rank, counts in self._counts.items() if rank in kept}

    def add(
        self,
        rank: Rank,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        predicted_tokens: int | None,
        reachable_tokens: int = 0,
    ) -> None:
        """Adds a request that has ended.

        Args:
            rank: Rank that served it.
            prompt_tokens: Tokens of its prompt.
            cached_tokens: Tokens that the worker found cached.
            predicted_tokens: Tokens that the index predicted as cached; None without a prediction.
            reachable_tokens: The same for the rank that held most of the prompt.
        """
        counts = self._counts.setdefault(rank, _Counts())
        counts.requests += 1
        counts.prompt_tokens += prompt_tokens
        counts.cached_tokens += cached_tokens
        if predicted_tokens is not None:
            counts.predicted_prompt_tokens += prompt_tokens
            counts.predicted_cached_tokens += predicted_tokens
            counts.reachable_cached_tokens += reachable_tokens

    def of(self, rank: Rank) -> HitCounts:
        """Returns the sums of one rank."""
        counts = self._counts.get(rank, _Counts())
        return HitCounts(
            requests=counts.requests,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            predicted_prompt_tokens=counts.predicted_prompt_tokens,
            predicted_cached_tokens=counts.predicted_cached_tokens,
            reachable_cached_tokens=counts.reachable_cached_tokens,
        )
