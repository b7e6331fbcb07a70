"""A rank's whole state, as dumps, snapshots and workers have it."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core import Rank


@dataclass(frozen=True, slots=True)
class RankDump:
    """A rank's state from elsewhere."""

    rank: Rank
    cursor: tuple[int, int]
    """(incarnation, next event id)"""
    partial: bool
    chunks: list[bytes]
    """Encoded RankState, the last one marked."""


class StaleDump(Exception):
    """The index knows more than a dump: loading it would lose what does not come again."""

    def __init__(self, rank: Rank, cursor: tuple[int, int], known: tuple[int, int]) -> None:
        super().__init__(f"rank {rank}: the dump is at (incarnation, event) {cursor}, the index at {known}")
