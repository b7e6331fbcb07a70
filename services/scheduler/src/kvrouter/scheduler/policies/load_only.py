"""Modes that ignore what ranks have in their caches: they query no Indexer."""

from __future__ import annotations

from bisect import bisect_right
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


class RandomPolicy(Policy):
    """Mode ``random``: any rank, with equal probability. Overlap and load are not used."""

    name: ClassVar[str] = "random"

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses any rank."""
        return Choice(rng.randrange(len(context.ranks)), Explanation("drawn at random"))


class RoundRobinPolicy(Policy):
    """Mode ``round-robin``: every rank in turn.

        next = first rank above the previous one in order of (worker_id, dp_rank); after the last rank, the first

    The turn follows ranks, not a counter: a rank may come, go or be busy for a while without effect on the turn of
    others. Overlap and load are not used.
    """

    name: ClassVar[str] = "round-robin"

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:  # noqa: ARG002 - nothing is left to chance
        """Chooses the next rank."""
        turn = 0 if context.previous is None else bisect_right(context.ranks, context.previous)
        return Choice(turn % len(context.ranks), Explanation("next in turn"))


class PowerOfTwoPolicy(Policy):
    """Mode ``power-of-two``: of two ranks drawn at random, the one with fewer requests.

        cost(w) = requests(w)        [requests]; infinite for the other ranks

    Ties are broken at random; a single candidate is taken. Two draws keep the highest load within log log n of the
    mean, and Schedulers without sight of each other find different ranks at the same moment.
    """

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


class DirectPolicy(Policy):
    """Mode ``direct``: the worker named by the request.

        cost(r) = requests(r)        [requests]

    If the request names no rank of the worker, the rank with the fewest requests wins; ties are broken at random. The
    candidates are ranks of the named worker only: whether it exists, is draining or is busy is checked before.
    """

    name: ClassVar[str] = "direct"
    needs_worker: ClassVar[bool] = True

    def decide(self, context: SchedulingContext, rng: Random) -> Choice:
        """Chooses the least loaded rank of the named worker."""
        costs = context.active_requests
        return Choice(draw_lowest(costs, rng), Explanation("named by the request", costs, {"active_requests": costs}))
