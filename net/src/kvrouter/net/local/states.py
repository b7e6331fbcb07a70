"""States of ranks that one part of a process hands to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.v1.names import ComponentName


@dataclass(frozen=True, slots=True)
class LocalState:
    """The whole state of a rank."""

    cursor: tuple[int, int]
    """(incarnation, next event id)"""
    partial: bool
    """Whether blocks may be missing."""
    chunks: Sequence[bytes]
    """Encoded RankState messages."""


class LocalStates:
    """States by component, worker id and rank, each until it is taken."""

    def __init__(self) -> None:
        self._states: dict[tuple[ComponentName, int, int], LocalState] = {}

    def put(self, component: ComponentName, worker_id: int, dp_rank: int, state: LocalState) -> None:
        """Offers a state in the place of a former one."""
        self._states[component, worker_id, dp_rank] = state

    def take(self, component: ComponentName, worker_id: int, dp_rank: int) -> LocalState | None:
        """Removes and returns the state of a rank; None if there is none."""
        return self._states.pop((component, worker_id, dp_rank), None)
