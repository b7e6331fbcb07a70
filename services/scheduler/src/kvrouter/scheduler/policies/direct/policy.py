"""Mode ``direct``: the worker that the request names.

    cost(r) = requests booked on r        [requests]

Where the request names no rank of that worker, the one with the fewest requests is taken, ties at random. Whether the
worker exists, is draining or is busy was judged before: only its own ranks are left as candidates. Reads no overlaps.
"""

from __future__ import annotations

from random import Random
from typing import ClassVar

from kvrouter.scheduler.policies.interface import Choice, Explanation, SchedulingContext, draw_lowest


class Rule:
    """Does as it is told."""

    name: ClassVar[str] = "direct"
    uses_overlap: ClassVar[bool] = False
    needs_worker: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """The named worker's rank."""
        costs = context.active_requests
        return Choice(draw_lowest(costs, rng), Explanation("named by the request", costs, {"active_requests": costs}))
