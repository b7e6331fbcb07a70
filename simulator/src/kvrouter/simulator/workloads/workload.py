"""A workload: the arrival, length and prompt content of each request.

A prompt consists of *pieces* of a fixed number of tokens, each with an id. Equal ids stand for equal tokens after equal
beginnings. Pieces of Mooncake traces have 512 tokens; pieces of recorded traffic are blocks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kvrouter.core import local_hashes, sequence_hashes
from kvrouter.scheduler.request.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One request."""

    arrives_s: float
    """Seconds after the start, at least 0."""
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    pieces: tuple[int, ...]
    """Ids of the prompt's pieces, in order; the last piece may be used in part."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    requests: Sequence[Request]
    piece_tokens: int
    """Tokens in a piece."""

    def faster(self, load: float) -> Workload:
        """Returns the same requests, arriving ``load`` times as fast."""
        requests = [replace(request, arrives_s=request.arrives_s / load) for request in self.requests]
        return replace(self, requests=requests)

    def first(self, count: int) -> Workload:
        """Returns the first ``count`` requests."""
        return replace(self, requests=self.requests[:count])


@lru_cache(maxsize=4)
def _positions(tokens: int) -> array[int]:
    return array("I", [position // 4 for position in range(tokens)])


@lru_cache(maxsize=1 << 16)
def expand(piece: int, tokens: int) -> bytes:
    """Returns the tokens of a piece id (u64) as little-endian u32: groups of four, (id, high half of id, i, i).

    Requests share pieces, so the last 65,536 are kept: at most 128 MiB with pieces of 512 tokens.
    """
    words = _positions(tokens)[:]
    words[0::4] = array("I", [piece & 0xFFFFFFFF]) * len(range(0, tokens, 4))
    words[1::4] = array("I", [piece >> 32 & 0xFFFFFFFF]) * len(range(1, tokens, 4))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class Prompts:
    """Prompts of a workload as tokens and as hashes. Each is hashed once, however many runs use it."""

    def __init__(self, workload: Workload, block_size: int) -> None:
        self._workload = workload
        self._block_size = block_size
        self._prompts: dict[int, Prompt] = {}

    def tokens(self, index: int) -> bytes:
        """Returns a prompt's token ids, little-endian u32."""
        request, width = self._workload.requests[index], self._workload.piece_tokens
        expanded = b"".join([expand(piece, width) for piece in request.pieces])
        return expanded[: 4 * request.prompt_tokens]

    def hashed(self, index: int) -> Prompt:
        """Returns a prompt as blocks."""
        prompt = self._prompts.get(index)
        if prompt is None:
            local = local_hashes(self.tokens(index), self._block_size)
            count = self._workload.requests[index].prompt_tokens
            prompt = self._prompts[index] = Prompt(count, local, sequence_hashes(local))
        return prompt
