"""Classifies a message of an engine by its sequence number and content, without I/O.

An engine numbers its messages from 0 in each of its lifetimes. PUB sockets drop messages silently, a replay overlaps
with live messages, and a restarted engine counts from 0 again without saying so. Content tells these apart: each
message has a check, which a replay of the same message has too.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum, auto

from xxhash import xxh3_64_intdigest

CHECK_BITS = 24
"""Bits of a check. A restarted engine passes for its predecessor once in 16 million cases."""

_CHECKS_KEPT = 4096


def check_of(payload: bytes) -> int:
    """Returns the check of a message: ``CHECK_BITS`` of a hash of its payload."""
    return xxh3_64_intdigest(payload) & ((1 << CHECK_BITS) - 1)


def position_of(sequence: int, check: int) -> int:
    """Returns the position of a message in a state, which a later process compares with the engine's messages."""
    return sequence << CHECK_BITS | check


def from_position(position: int) -> tuple[int, int]:
    """Returns sequence and check of a position."""
    return position >> CHECK_BITS, position & ((1 << CHECK_BITS) - 1)


class Verdict(Enum):
    """Treatment of a message."""

    APPLY = auto()
    """It is the next one."""
    DUPLICATE = auto()
    """It was applied already."""
    GAP = auto()
    """Messages before it are missing."""
    RESTART = auto()
    """The engine restarted: it counts from the start again."""


class SequenceTracker:
    """Follows the messages of one rank."""

    def __init__(self) -> None:
        self.next_sequence = 0
        """Sequence of the next message."""
        self._checks: OrderedDict[int, int] = OrderedDict()
        self._replayed_until = 0

    @property
    def last_check(self) -> int | None:
        """Check of the last message; None if there is none."""
        return self._checks.get(self.next_sequence - 1)

    def judge(self, sequence: int, check: int) -> Verdict:
        """Returns the class of a live message."""
        if sequence >= self.next_sequence:
            return Verdict.APPLY if sequence == self.next_sequence else Verdict.GAP
        known = self._checks.get(sequence)
        if known == check or (known is None and sequence < self._replayed_until):
            # Live messages that waited during a replay repeat what was replayed.
            return Verdict.DUPLICATE
        return Verdict.RESTART

    def applied(self, sequence: int, check: int, *, replayed: bool = False) -> None:
        """Moves behind a message, whether it was the next one or not."""
        self.next_sequence = sequence + 1
        # Once a live message is new, no earlier one can follow it.
        self._replayed_until = self.next_sequence if replayed else 0
        self._checks[sequence] = check
        if len(self._checks) > _CHECKS_KEPT:
            self._checks.popitem(last=False)

    def restart(self) -> None:
        """Begins again at 0."""
        self.next_sequence = self._replayed_until = 0
        self._checks.clear()
