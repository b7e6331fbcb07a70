"""Mode ``product``: prompt tokens to compute times requests in flight, both with this request.

    cost(w) = (prefill tokens(w) + new tokens(w)) * (requests(w) + 1)        [tokens * requests]

The lowest cost wins; ties are broken at random. A product needs no weight: a rank with twice the requests must save
half of the computation. It knows neither capacity nor time, so past the knee it sends requests to ranks whose cache is
full.

Missing signals:

- no overlap: all prompt tokens are new.
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


class Rule(Policy):
    """Minimizes the product of tokens to compute and requests."""

    name: ClassVar[str] = "product"
    uses_overlap: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the rank with the lowest product."""
        tokens = context.prefill_tokens + context.new_prefill_tokens
        requests = context.active_requests + 1
        costs = tokens.astype(np.float64) * requests

        def formula(index: int) -> str:
            label = rank_label(context.ranks[index])
            return f"Formula for {label}: {costs[index]:.0f} = {tokens[index]} tokens * {requests[index]} requests"

        explanation = Explanation("lowest product", costs, {"tokens": tokens, "requests": requests}, formula)
        return Choice(draw_lowest(costs, rng), explanation)
