"""Prompts by the local hashes of their blocks."""

from __future__ import annotations

from collections.abc import Iterable

from kvrouter.core import sequence_hashes

from .. import batches


def packed(local_hashes: Iterable[int]) -> bytes:
    """Returns the sequence hashes of the blocks."""
    return sequence_hashes(batches.packed(local_hashes))
