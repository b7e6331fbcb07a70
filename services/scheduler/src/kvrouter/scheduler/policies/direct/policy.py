"""Mode ``direct``: the worker named by the request.

    cost(r) = requests(r)        [requests]

If the request names no rank of the worker, the rank with the fewest requests wins; ties are broken at random. The
candidates are ranks of the named worker only: whether it exists, is draining or is busy is checked before. Overlaps are
not used.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, Policy, SchedulingContext, draw_lowest


class Rule(Policy):
    """Takes the worker named by the request."""

    name: ClassVar[str] = "direct"
    needs_worker: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the least loaded rank of the named worker."""
        costs = context.active_requests
        return Choice(draw_lowest(costs, rng), Explanation("named by the request", costs, {"active_requests": costs}))
