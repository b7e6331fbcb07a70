"""A rank's whole state, as it comes from a dump, a snapshot or a worker."""

from __future__ import annotations

from dataclasses import dataclass

from kvrouter.core import Rank


@dataclass(frozen=True, slots=True)
class RankDump:
    """The whole state of a rank."""

    rank: Rank
    cursor: tuple[int, int]
    """(incarnation, next event id)"""
    partial: bool
    chunks: list[bytes]
    """Encoded RankState messages; the last one has ``last`` set."""


class StaleDump(Exception):
    """Raised when the index is ahead of a dump: loading the dump would lose events, which are not sent again."""

    def __init__(self, rank: Rank, cursor: tuple[int, int], known: tuple[int, int]) -> None:
        super().__init__(f"rank {rank}: the dump is at (incarnation, event) {cursor}, the index at {known}")
