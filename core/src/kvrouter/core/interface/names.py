"""Names of ranks, and the inputs of hashing: tokens and the scope of a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

Rank = tuple[int, int]
"""(worker_id, dp_rank)"""

TokenBuffer = bytes | bytearray | memoryview | Sequence[int]
"""Token ids: a list or array of ints, or a contiguous buffer of 32-bit integers (``bytes`` are little-endian u32)."""


class Scope(NamedTuple):
    """Adapter, salt and tenant: blocks are shared only within one scope."""

    lora_name: str = ""
    """Name of the LoRA adapter; empty for the base model."""
    cache_salt: str = ""
    """Salt to separate a client's cache from others; empty for none."""
    tenant: str = ""
    """Tenant whose cache is separate from others; empty for none."""


class NotATokenId(ValueError):
    """Raised when an element of a JSON array is not an integer from 0 to 2^32 - 1."""

    def __init__(self, index: int) -> None:
        """Creates the error: ``index`` is the number of the element, from 0."""
        super().__init__(f"expected an integer from 0 to 2^32 - 1 as element {index}")
        self.index = index


class RankInfo(NamedTuple):
    """State of one rank in the index."""

    worker_id: int
    dp_rank: int
    incarnation: int
    next_event_id: int
    blocks: int
    """Number of entries: (engine hash, tier) pairs."""
    memory_bytes: int
    """Estimated memory freed by the removal of this rank."""
    partial: bool
    """Whether blocks may be missing."""
    evicted: bool = False
    """Whether the rank was emptied because the index reached a bound, and stores no blocks since."""
