"""Counts which prefixes of prompts are the most popular, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.frontend.recording.recorder import Outline
from xxhash import xxh3_64_intdigest

_HASH_BYTES = 8
MAX_BLOCKS = 1024
"""Longest counted prefix, in blocks."""
_SAME = 0.9
"""Share of a prefix's requests from which a longer prefix stands for it."""


@dataclass(slots=True)
class _Counter:
    model: str
    hashes: bytes
    tokens: int
    parent: int
    count: float


@dataclass(frozen=True, slots=True)
class PopularPrefix:
    """A prefix several requests began with."""

    prefix_id: int
    """Hash of the model and the prefix."""
    model: str
    local_hashes: bytes
    """Hashes of its blocks, packed little-endian u64."""
    tokens: int
    requests: float
    """Estimated recent requests: each counts half as much after every ageing."""


class PopularPrefixes:
    """Counts prefixes of 1, 2, 4, 8, ... blocks of sampled requests.

    When there are too many prefixes the rarest are forgotten, so a count may be too low by what was forgotten.
    """

    def __init__(self, capacity: int = 1024, sample_every: int = 4) -> None:
        """Keeps at most ``2 * capacity`` prefixes, of one request in ``sample_every``."""
        self._capacity = capacity
        self._sample_every = sample_every
        self._until_sample = 1
        self._counters: dict[int, _Counter] = {}

    def __len__(self) -> int:
        """Returns the number of counted prefixes."""
        return len(self._counters)

    def wants_next(self) -> bool:
        """Returns whether the next request is in the sample. Call it once for each request."""
        self._until_sample -= 1
        if self._until_sample:
            return False
        self._until_sample = self._sample_every
        return True

    def note(self, outline: Outline) -> None:
        """Counts the prefixes of a request of the sample."""
        counters, hashes, requests = self._counters, outline.local_hashes, self._sample_every
        parent, size, longest = 0, _HASH_BYTES, min(len(hashes), MAX_BLOCKS * _HASH_BYTES)
        prefix = outline.model.encode() + b"\0"
        while size <= longest:
            name = xxh3_64_intdigest(prefix + hashes[:size])
            counter = counters.get(name)
            if counter is None:
                tokens = size // _HASH_BYTES * outline.block_size
                counter = counters[name] = _Counter(outline.model, hashes[:size], tokens, parent, 0.0)
            counter.count += requests
            parent = name
            size *= 2
        if len(self._counters) > 2 * self._capacity:
            self._forget()

    def age(self) -> None:
        """Halves all counts."""
        for counter in self._counters.values():
            counter.count /= 2
        self._counters = {name: each for name, each in self._counters.items() if each.count >= 1}

    def top(self, limit: int) -> list[PopularPrefix]:
        """Returns the prefixes that spare most tokens if they are cached, most first.

        A prefix is left out if a longer one has nearly as many requests, and if it began a single request.
        """
        replaced = {
            each.parent
            for each in self._counters.values()
            if each.parent in self._counters and each.count >= _SAME * self._counters[each.parent].count
        }
        found = [
            (name, each)
            for name, each in self._counters.items()
            if name not in replaced and each.count > self._sample_every
        ]
        found.sort(key=lambda pair: pair[1].count * pair[1].tokens, reverse=True)
        return [PopularPrefix(name, each.model, each.hashes, each.tokens, each.count) for name, each in found[:limit]]

    def _forget(self) -> None:
        kept = sorted(self._counters.items(), key=lambda pair: pair[1].count, reverse=True)[: self._capacity]
        self._counters = dict(kept)
