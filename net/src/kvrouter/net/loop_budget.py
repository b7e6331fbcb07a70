"""Bounds the work that readers of messages do in one pass of the event loop.

A pass runs everything that is ready. While messages wait in a socket, reading the next one does not return to the loop,
and a thousand connections that are ready at once are one pass. Readers take a turn for each message, so that leases,
probes and new connections get theirs between passes. Turns are granted in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

PASS_US = 10_000
"""Work of one pass, microseconds of CPU time as estimated by the readers. A pass should take at most 20 ms on a machine
that is half as fast."""


class LoopBudget:
    """Work that the current pass may still do. Belongs to one event loop; see ``loop_budget``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pass_us: int = PASS_US) -> None:
        self._loop = loop
        self._pass_us = pass_us
        self._left_us = pass_us
        self._is_pass_open = False
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def turn(self, cost_us: int) -> None:
        """Waits for a pass with room for some work. Work beyond the budget of a whole pass gets a pass of its own.

        Args:
            cost_us: Estimated CPU time of the work, microseconds.
        """
        if not self._waiting and self._fits(cost_us):
            self._take(cost_us)
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((turn, cost_us))
        await turn

    def _fits(self, cost_us: int) -> bool:
        return cost_us <= self._left_us or self._left_us == self._pass_us

    def _take(self, cost_us: int) -> None:
        self._left_us -= cost_us
        if not self._is_pass_open:
            self._is_pass_open = True
            self._loop.call_soon(self._begin_pass)

    def _begin_pass(self) -> None:
        self._is_pass_open = False
        self._left_us = self._pass_us
        while self._waiting and (self._waiting[0][0].done() or self._fits(self._waiting[0][1])):
            turn, cost_us = self._waiting.popleft()
            if not turn.done():  # Not cancelled.
                self._take(cost_us)
                turn.set_result(None)


_budgets: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBudget] = WeakKeyDictionary()


def loop_budget() -> LoopBudget:
    """Returns the budget of the running event loop, which all its readers share."""
    loop = asyncio.get_running_loop()
    budget = _budgets.get(loop)
    if budget is None:
        budget = _budgets[loop] = LoopBudget(loop)
    return budget
