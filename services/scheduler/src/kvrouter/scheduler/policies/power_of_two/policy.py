"""Mode ``power-of-two``: of two ranks drawn at random, the one with fewer requests.

    cost(w) = requests(w)        [requests]; infinite for the other ranks

Ties are broken at random; a single candidate is taken. Two draws keep the highest load within log log n of the mean,
and Schedulers without sight of each other find different ranks at the same moment. Overlaps are not
used.
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
    """Compares two ranks drawn at random."""

    name: ClassVar[str] = "power-of-two"

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the less loaded of two ranks."""
        drawn = rng.sample(range(len(context.ranks)), min(2, len(context.ranks)))
        costs = np.full(len(context.ranks), np.inf)
        costs[drawn] = context.active_requests[drawn]
        terms = {"active_requests": context.active_requests}

        def formula(index: int) -> str:
            label, requests = rank_label(context.ranks[index]), context.active_requests[index]
            return f"Requests on {label}: {requests}" if index in drawn else f"{label} was not drawn"

        return Choice(
            draw_lowest(costs, rng), Explanation("fewer requests of two drawn at random", costs, terms, formula)
        )
