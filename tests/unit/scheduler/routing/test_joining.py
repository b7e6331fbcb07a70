"""An idle rank joins busy ones: it fills, and nobody herds onto it."""

from __future__ import annotations

from collections import deque
from itertools import count
from random import Random

import pytest
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import decide
from kvrouter.scheduler.workers.candidates import WorkerConstraints

from ..harness import BLOCK, overlaps_of, view, worker

NEWCOMER = 9
BUSY = range(1, NEWCOMER)
IN_FLIGHT = dict(zip(BUSY, range(60, 220, 20), strict=True))
"""Requests on each of the busy ones: 500 more do not make the others level with the largest."""
SHARED, LEAST, MOST = 4, 8, 40
"""Number of blocks that all prompts begin with, which the busy ranks have, and number of further blocks of a prompt."""
UNDER_WAY = 9
"""Requests without a first token at any time."""


class Traffic:
    """Requests that are chosen for and booked as a Scheduler does it, and what becomes of them."""

    def __init__(self, mode: str, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.busy = [worker(number, total_blocks=20_000, max_batched_tokens=8192) for number in BUSY]
        self.resident = {(number, 0): (SHARED, 1) for number in BUSY}
        self.pool = Pool(view(*self.busy), Accounting(), 10.0, clock=lambda: self.now)
        self.options = RoutingOptions(mode)
        self.shared = self.rng.randbytes(8 * SHARED)
        self.numbers = count(1)
        self.running: list[Key] = []
        self.computing: deque[Key] = deque()

    def join(self) -> None:
        self.pool.follow(view(*self.busy, worker(NEWCOMER, total_blocks=20_000, max_batched_tokens=8192)))

    def arrive(self, worker_id: int | None = None) -> None:
        """A request comes, to that worker where one is named."""
        self.now += 0.02
        hashes = self.shared + self.rng.randbytes(8 * self.rng.randint(LEAST, MOST))
        prompt = Prompt(len(hashes) // 8 * BLOCK, b"", hashes)
        constraints, overlaps = WorkerConstraints(worker_id=worker_id), overlaps_of(self.resident)
        key = (str(next(self.numbers)), 0, 1)
        request = RequestContext(self.pool, prompt, constraints, self.options)
        decision = decide(request, overlaps, rng=self.rng, now=self.now)
        assert self.pool.booked_load.book(
            key, decision.rank, prompt, decision.prefill_tokens, expected=decision.expected(request)
        )
        self.resident[decision.rank] = (SHARED, 1)
        self.running.append(key)
        self.computing.append(key)
        if len(self.computing) > UNDER_WAY:
            self.pool.booked_load.prefill_complete(self.computing.popleft())

    def end_one(self) -> None:
        """Any of those in flight ends."""
        self.pool.booked_load.free(self.running.pop(self.rng.randrange(len(self.running))))

    def active_blocks(self) -> list[int]:
        """Of the busy ones, and of the newcomer."""
        return list(self.pool.booked_load.loads().active_blocks.tolist())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("as_many_end", [False, True], ids=["nobody ends", "as many end"])
@pytest.mark.parametrize("mode", ["kv", "forecast"])
def test_an_idle_rank_that_joins_busy_ones_fills_and_is_never_the_largest(
    mode: str, as_many_end: bool, seed: int
) -> None:
    traffic = Traffic(mode, seed)
    for number, requests in IN_FLIGHT.items():
        for _ in range(requests):
            traffic.arrive(number)
    traffic.join()
    # As long as one of theirs is larger it does not reach that; once all are level, any may be ahead by a request.
    ahead = SHARED + MOST if as_many_end else 0
    for _ in range(500):
        traffic.arrive()
        if as_many_end:
            traffic.end_one()
        *theirs, newcomers = traffic.active_blocks()
        assert newcomers <= max(theirs) + ahead
    assert newcomers >= min(theirs) / 2
