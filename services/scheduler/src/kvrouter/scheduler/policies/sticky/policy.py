"""Mode ``sticky``: the rank with the largest overlap, unless it is saturated.

    saturated(w) = active blocks(w) > ROOM * total blocks(w) or prefill tokens(w) > tokens per step of w
    cost(w)      = (saturated(w), -overlap(w), requests(w))          [compared in this order]

Active blocks include this request, prefill tokens do not. The lowest cost wins; ties are broken at random. Many routers
with session or prefix affinity work this way: cache hits first, load only where it hurts.

Missing signals:

- no overlap: the fewest requests among unsaturated ranks;
- total blocks or token budget unknown (0): the rank is not judged by it.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

import numpy as np
from kvrouter.scheduler.policies.interface import (
    Choice,
    Explanation,
    Policy,
    SchedulingContext,
    draw_lowest,
    rank_label,
)

ROOM = 0.95
"""Share of the blocks above which decoding soon preempts."""


class Rule(Policy):
    """Follows the longest overlap."""

    name: ClassVar[str] = "sticky"
    uses_overlap: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the unsaturated rank with the longest overlap."""
        full = (context.total_blocks > 0) & (context.active_blocks > ROOM * context.total_blocks)
        behind = (context.max_batched_tokens > 0) & (context.prefill_tokens > context.max_batched_tokens)
        saturated = full | behind
        order = np.stack([saturated, -context.overlap_blocks, context.active_requests], axis=1)
        places = np.unique(order, axis=0, return_inverse=True)[1].reshape(-1)

        def formula(index: int) -> str:
            state = "saturated" if saturated[index] else "not saturated"
            return (
                f"{rank_label(context.ranks[index])}: {state}, {context.overlap_blocks[index]} blocks cached, "
                f"{context.active_requests[index]} requests"
            )

        terms = {"saturated": saturated.astype(np.int64), "active_requests": context.active_requests}
        return Choice(
            draw_lowest(places, rng), Explanation("longest overlap that is not saturated", places, terms, formula)
        )
