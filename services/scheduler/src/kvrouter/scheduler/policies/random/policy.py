"""Mode ``random``: any rank, with the same chance. Reads neither overlaps nor loads."""

from __future__ import annotations

from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, SchedulingContext


class Rule:
    """Draws."""

    name: ClassVar[str] = "random"
    uses_overlap: ClassVar[bool] = False
    needs_worker: ClassVar[bool] = False

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Any rank."""
        return Choice(rng.randrange(len(context.ranks)), Explanation("drawn at random"))
