"""Inputs of hashing: tokens and what besides tokens names a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TokenBuffer = bytes | bytearray | memoryview | Sequence[int]
"""Token ids: a list or array of ints, or a contiguous buffer of 32-bit integers (``bytes`` are little-endian u32)."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What besides its tokens decides whether a block may be shared."""

    lora_name: str = ""
    """Name of the LoRA adapter; empty for the base model."""
    cache_salt: str = ""
    """Salt that separates a client's cache from others; empty for none."""
    tenant: str = ""
    """Tenant whose cache is separate from others; empty for none."""


class NotATokenId(ValueError):
    """Raised when an element of a JSON array is not an integer from 0 to 2^32 - 1."""

    def __init__(self, index: int) -> None:
        """Creates the error: ``index`` is the number of the element, from 0."""
        super().__init__(f"expected an integer from 0 to 2^32 - 1 as element {index}")
        self.index = index
