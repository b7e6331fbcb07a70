"""Mode ``product``: prompt tokens to compute times requests in flight, both as they would be with this request.

    cost(w) = (prefill tokens booked on w and not done + new tokens(w)) * (requests booked on w + 1)
                                                                              [tokens * requests]

Lowest cost wins, ties at random. A product has no weight to set: a rank twice as full must spare half the computing. It
knows neither capacity nor time, so past the knee it piles requests on ranks whose cache is full.

Missing signals: no overlaps: all new tokens are the prompt's.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

import numpy as np
from kvrouter.scheduler.policies.interface import Choice, Explanation, SchedulingContext, draw_lowest, rank_label


class Rule:
    """Multiplies."""

    name: ClassVar[str] = "product"
    uses_overlap: ClassVar[bool] = True
    needs_worker: ClassVar[bool] = False

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """The rank of the lowest product."""
        tokens = context.prefill_tokens + context.new_prefill_tokens
        requests = context.active_requests + 1
        costs = tokens.astype(np.float64) * requests

        def formula(index: int) -> str:
            label = rank_label(context.ranks[index])
            return f"Formula for {label}: {costs[index]:.0f} = {tokens[index]} tokens * {requests[index]} requests"

        explanation = Explanation("lowest product", costs, {"tokens": tokens, "requests": requests}, formula)
        return Choice(draw_lowest(costs, rng), explanation)
