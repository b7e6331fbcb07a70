"""What is sent: when each request comes, how long it is, and what its prompt consists of.

A prompt is named by ids of *pieces* of so many tokens: equal ids stand for equal tokens after equal beginnings. Pieces
of Mooncake traces have 512 tokens; those of recordings of one's own traffic are blocks.
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
    """Seconds after the start, 0 or more."""
    prompt_tokens: int
    """1 or more."""
    output_tokens: int
    """1 or more."""
    pieces: tuple[int, ...]
    """Ids of the prompt's pieces, in order; the last one may be used in part."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order in which they come."""

    name: str
    requests: Sequence[Request]
    piece_tokens: int
    """Tokens in a piece."""

    def faster(self, load: float) -> Workload:
        """The same requests, arriving ``load`` times as fast."""
        requests = [replace(request, arrives_s=request.arrives_s / load) for request in self.requests]
        return replace(self, requests=requests)

    def first(self, count: int) -> Workload:
        """Its first ``count`` requests."""
        return replace(self, requests=self.requests[:count])


@lru_cache(maxsize=4)
def _positions(tokens: int) -> array[int]:
    return array("I", [position // 4 for position in range(tokens)])


def expand(piece: int, tokens: int) -> bytes:
    """The tokens that a piece id (a u64) stands for, little-endian u32: groups of four, (id, id's high half, i, i)."""
    words = _positions(tokens)[:]
    words[0::4] = array("I", [piece & 0xFFFFFFFF]) * len(range(0, tokens, 4))
    words[1::4] = array("I", [piece >> 32 & 0xFFFFFFFF]) * len(range(1, tokens, 4))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


class Prompts:
    """Prompts of a workload, as tokens and as the hashes that the router goes by; hashed once, whatever is run."""

    def __init__(self, workload: Workload, block_size: int) -> None:
        self._workload = workload
        self._block_size = block_size
        self._prompts: dict[int, Prompt] = {}

    def tokens(self, index: int) -> bytes:
        """A prompt's token ids, little-endian u32."""
        request, width = self._workload.requests[index], self._workload.piece_tokens
        expanded = b"".join([expand(piece, width) for piece in request.pieces])
        return expanded[: 4 * request.prompt_tokens]

    def hashed(self, index: int) -> Prompt:
        """A prompt as blocks."""
        prompt = self._prompts.get(index)
        if prompt is None:
            local = local_hashes(self.tokens(index), self._block_size)
            count = self._workload.requests[index].prompt_tokens
            prompt = self._prompts[index] = Prompt(count, local, sequence_hashes(local))
        return prompt
