"""Mode ``fewest-blocks``: the rank with the fewest blocks in use after the request.

cost(w) = active blocks(w) - leading blocks of the prompt that the rank holds(w)        [blocks]
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import (
    Choice,
    Explanation,
    Policy,
    SchedulingContext,
    draw_lowest,
)


class FewestBlocksPolicy(Policy):
    """Prefers ranks with few blocks in use, and with much of the prompt."""

    name: ClassVar[str] = "fewest-blocks"
    uses_overlap: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the cheapest rank."""
        costs = context.active_blocks - context.overlap_blocks
        terms = {"active_blocks": context.active_blocks, "overlap_blocks": context.overlap_blocks}
        return Choice(draw_lowest(costs, rng), Explanation("fewest blocks", costs, terms))
