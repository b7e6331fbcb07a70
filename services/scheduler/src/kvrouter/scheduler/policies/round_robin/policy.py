"""Mode ``round-robin``: every rank in turn.

    next = first rank above the previous one in order of (worker_id, dp_rank); after the last rank, the first

The turn follows ranks, not a counter: a rank may come, go or be busy for a while without effect on the turn of others.
Overlap and load are not used.
"""

from __future__ import annotations

from bisect import bisect_right
from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, Policy, SchedulingContext


class Rule(Policy):
    """Takes ranks in turn."""

    name: ClassVar[str] = "round-robin"

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:  # noqa: ARG002 - nothing is left to chance
        """Chooses the next rank."""
        turn = 0 if context.previous is None else bisect_right(context.ranks, context.previous)
        return Choice(turn % len(context.ranks), Explanation("next in turn"))
