"""Mode ``round-robin``: each rank in its turn.

    next = the first rank above the one chosen last, in order of (worker_id, dp_rank); the first of all after the last

The turn goes by rank, not by a count, so that ranks that come, go or are busy for a while disturb nobody else's turn.
Reads neither overlaps nor loads.
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, SchedulingContext


class Rule:
    """Takes turns."""

    name: ClassVar[str] = "round-robin"
    uses_overlap: ClassVar[bool] = False
    needs_worker: ClassVar[bool] = False

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:  # noqa: ARG002 - nothing is left to chance
        """The rank whose turn it is."""
        turn = 0 if context.previous is None else bisect_right(context.ranks, context.previous)
        return Choice(turn % len(context.ranks), Explanation("its turn"))
