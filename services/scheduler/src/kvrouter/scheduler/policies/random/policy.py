"""Mode ``random``: any rank, with equal probability. Overlap and load are not used."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, Policy, SchedulingContext


class Rule(Policy):
    """Draws a rank."""

    name: ClassVar[str] = "random"

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses any rank."""
        return Choice(rng.randrange(len(context.ranks)), Explanation("drawn at random"))
