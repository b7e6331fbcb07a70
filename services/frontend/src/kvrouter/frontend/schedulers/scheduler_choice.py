"""Chooses the Scheduler of a link: the component's, unless it recently failed to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import structlog
from kvrouter.frontend.schedulers.connections import SchedulerConnection, SchedulerSource
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ListBusyThresholdsRequest

log = structlog.get_logger(component="frontend")

_AVOIDED_SECONDS = 15.0
"""Time for which a Scheduler that did not answer is avoided, seconds: longer than the lease of a dead Scheduler."""


class SchedulerChoice:
    """The Schedulers of one component or shard, and which of them to avoid."""

    def __init__(self, component: ComponentName, source: SchedulerSource, shard: int) -> None:
        self._component = component
        self._source = source
        self._shard = shard
        self._until: dict[str, float] = {}

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the Schedulers to avoid."""
        now, live = time.monotonic(), self._source.is_live
        # A Scheduler that left and registers again is another process, or has recovered.
        self._until = {each: until for each, until in self._until.items() if now < until and live(each)}
        return self._until.keys()

    def avoid(self, scheduler_id: str) -> None:
        """Avoids a Scheduler for 15 s if there is another."""
        self._until[scheduler_id] = time.monotonic() + _AVOIDED_SECONDS

    def pick(self) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to open a session at: an avoided one if there is no other, None if none is live."""
        return self._source.pick(self._component, self.avoided, self._shard)

    def better_than(self, scheduler_id: str) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to move to; None if the given one is the choice."""
        return self._other(scheduler_id, self.avoided)

    def instead_of(self, scheduler_id: str) -> tuple[str, SchedulerConnection] | None:
        """Returns the Scheduler to move to if the given one does not answer; None if there is none."""
        return self._other(scheduler_id, {*self.avoided, scheduler_id})

    async def answers(self, scheduler_id: str, connection: SchedulerConnection, seconds: float) -> bool:
        """Returns whether a Scheduler answers a call in time. One that does not is avoided."""
        try:
            # The cheapest call that needs the Scheduler's event loop.
            deadline = Deadline.after(seconds)
            await connection.scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=deadline)
        except KvRouterError as error:
            self.avoid(scheduler_id)
            log.info(
                "scheduler.avoided", scheduler=scheduler_id, component_name=str(self._component), cause=error.message
            )
            return False
        return True

    async def changed(self) -> None:
        """Returns when the choice may have changed."""
        try:
            async with asyncio.timeout(_AVOIDED_SECONDS if self._until else None):
                await self._source.changed()
        except TimeoutError:
            return

    def _other(self, scheduler_id: str, avoided: Collection[str]) -> tuple[str, SchedulerConnection] | None:
        other = self._source.pick(self._component, avoided, self._shard)
        return None if other is None or other[0] == scheduler_id or other[0] in avoided else other
