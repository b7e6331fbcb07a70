"""Notices which predicted blocks an engine has evicted, by the cached tokens that it reports.

Engines evict the least recently used blocks first. So a rank without a predicted prefix has also lost every block that
it used before its last use of the prefix. Two requests must miss, because the request that should have left the prefix
may have failed. Requests between them may find prefixes that were used more recently than both: of many prefixes, a few
are evicted at first. One that was used less recently contradicts the eviction. A request does not count while another
one with its prefix may still run: the prefix may not be computed yet.

An eviction also shows how much the cache holds: less than the rank has used since. For a while the rank is predicted to
hold no more than that. A prefix that it holds although it was not predicted shows that it holds more, by its length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import msgspec
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key

_FOUND_SHARE = 0.5
"""Share of a predicted prefix that counts as found. Lengths of untokenized prompts are estimates."""
_MISSES = 2
"""Requests of a rank that must miss their prefixes, with no contradiction between them."""

_REUSE_STEP = 1 / 64
"""Correction of the share of cached tokens by one request."""


class _Expected(msgspec.Struct, frozen=True):
    began: float
    """Time at which the request was booked, seconds."""
    last_use: float | None
    """Time of the last request with its predicted prefix; None if there is none, or if that may still run."""
    tokens: int
    """Length of that prefix."""


@dataclass(slots=True)
class _Running:
    requests: dict[Key, _Expected] = field(default_factory=dict)
    """Those booked on the rank, the oldest first."""
    misses: int = 0
    """Requests that missed since the last contradiction."""
    missed_use: float = -math.inf
    """Most recent last use of their prefixes, seconds."""
    found_use: float = math.inf
    """Least recent last use of the prefixes found since the first of them, seconds."""
    most_tokens: int = 0
    """Number of tokens that the rank holds at most, until ``limited_until``."""
    limited_until: float = -math.inf
    """Seconds."""


class EvictionCheck:
    """Compares predictions with reports, for the ranks of a component."""

    def __init__(self) -> None:
        """Starts without ranks."""
        self._ranks: dict[Rank, _Running] = {}
        self._reused = 0.0
        """Share of the tokens of recent prompts that were found in caches."""

    def begin(self, key: Key, rank: Rank, now: float, last_use: float | None, tokens: int) -> None:
        """Adds a request.

        Args:
            key: Its booking.
            rank: Its rank.
            now: Time of the booking, seconds.
            last_use: Time of the last request with its predicted prefix; None if none is predicted.
            tokens: Length of that prefix.
        """
        running = self._ranks.get(rank)
        if running is None:
            running = self._ranks[rank] = _Running()
        oldest = next(iter(running.requests.values()), None)
        is_settled = last_use is not None and (oldest is None or last_use < oldest.began)
        running.requests[key] = _Expected(now, last_use if is_settled else None, tokens)

    def end(self, key: Key, rank: Rank, cached_tokens: int | None, prompt_tokens: int) -> float | None:
        """Removes a request. If it shows an eviction, returns the time of last use up to which blocks are gone.

        Args:
            key: Its booking.
            rank: Its rank.
            cached_tokens: Prompt tokens that the engine found in its cache; None if unknown.
            prompt_tokens: All prompt tokens.
        """
        running = self._ranks.get(rank)
        expected = None if running is None else running.requests.pop(key, None)
        if running is None or expected is None or cached_tokens is None:
            return None
        self._reused += (min(cached_tokens / prompt_tokens, 1.0) - self._reused) * _REUSE_STEP
        if expected.tokens < _FOUND_SHARE * cached_tokens:
            running.most_tokens += cached_tokens - expected.tokens
        if expected.last_use is None:
            return None
        if cached_tokens >= _FOUND_SHARE * expected.tokens:
            running.found_use = min(running.found_use, expected.last_use)
            if expected.last_use <= running.missed_use:
                running.misses = 0
            return None
        if not running.misses or expected.last_use >= running.found_use:
            running.misses, running.missed_use, running.found_use = 0, -math.inf, math.inf
        running.misses += 1
        running.missed_use = max(running.missed_use, expected.last_use)
        return expected.last_use if running.misses >= _MISSES else None

    def limit(self, rank: Rank, tokens: int, until: float) -> None:
        """Notes how many tokens a rank has used since those that it evicted. They count until a time, seconds.

        Of several evictions in a row the greatest number counts: if a rank has cleared its cache, it has evicted what
        it used last, too.
        """
        running = self._ranks.setdefault(rank, _Running())
        if running.misses > _MISSES:
            tokens = max(tokens, running.most_tokens)
        running.most_tokens, running.limited_until = tokens, until

    def most_tokens(self, rank: Rank, now: float) -> int | None:
        """Returns how many tokens a rank holds at most; None if no eviction shows it. ``now``: seconds."""
        running = self._ranks.get(rank)
        return running.most_tokens if running is not None and now < running.limited_until else None

    def reuse_chance(self, rank: Rank, now: float) -> float:
        """Returns the chance that a block of a rank is used again; 0 if no eviction shows that its cache is full.

        Each use of a block is followed by another one with the share of uses that find it, on any rank: a rank that
        evicts blocks before their next use finds few, and would seem the best to evict more from. ``now``: seconds.
        """
        running = self._ranks.get(rank)
        return self._reused if running is not None and now < running.limited_until else 0.0

    def move(self, key: Key) -> None:
        """Removes a request whose rank changes."""
        for running in self._ranks.values():
            running.requests.pop(key, None)

    def forget(self, rank: Rank) -> None:
        """Removes a rank."""
        self._ranks.pop(rank, None)
