"""Which Scheduler a link uses: the component's, but for those that did not answer of late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

import structlog
from kvrouter.frontend.scheduler_client.source import SchedulerSource
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ListBusyThresholdsRequest

log = structlog.get_logger(component="frontend")

_AVOIDED_SECONDS = 15.0
"""Time for which a Scheduler that did not answer is avoided: a dead one's lease has ended by then."""


class SchedulerChoice:
    """The Schedulers of one component, or of one shard of it, and those of them to avoid."""

    def __init__(self, component: ComponentName, source: SchedulerSource, shard: int) -> None:
        self._component = component
        self._source = source
        self._shard = shard
        self._until: dict[str, float] = {}

    @property
    def avoided(self) -> Collection[str]:
        """Ids of the Schedulers to avoid."""
        now, live = time.monotonic(), self._source.is_live
        # One that registers anew is another process, or at work again.
        self._until = {each: until for each, until in self._until.items() if now < until and live(each)}
        return self._until.keys()

    def avoid(self, scheduler_id: str) -> None:
        """Avoids a Scheduler for a while, where there is another."""
        self._until[scheduler_id] = time.monotonic() + _AVOIDED_SECONDS

    def pick(self) -> tuple[str, Scheduler] | None:
        """The Scheduler to open a session at, one to avoid where there is no other; None where none is live."""
        return self._source.pick(self._component, self.avoided, self._shard)

    def better_than(self, scheduler_id: str) -> tuple[str, Scheduler] | None:
        """The Scheduler to move to from that one; None where that one is the choice."""
        return self._other(scheduler_id, self.avoided)

    def instead_of(self, scheduler_id: str) -> tuple[str, Scheduler] | None:
        """The Scheduler to move to if that one does not answer; None where there is none."""
        return self._other(scheduler_id, {*self.avoided, scheduler_id})

    async def answers(self, scheduler_id: str, scheduler: Scheduler, seconds: float) -> bool:
        """Asks a Scheduler whether it is at work. One that does not answer in time is avoided."""
        try:
            # The cheapest call that its event loop answers.
            await scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=Deadline.after(seconds))
        except KvRouterError as error:
            self.avoid(scheduler_id)
            log.info("scheduler.avoided", scheduler=scheduler_id, component_name=str(self._component), cause=str(error))
            return False
        return True

    async def changed(self) -> None:
        """Returns when another Scheduler may be the choice."""
        try:
            async with asyncio.timeout(_AVOIDED_SECONDS if self._until else None):
                await self._source.changed()
        except TimeoutError:
            return

    def _other(self, scheduler_id: str, avoided: Collection[str]) -> tuple[str, Scheduler] | None:
        other = self._source.pick(self._component, avoided, self._shard)
        return None if other is None or other[0] == scheduler_id or other[0] in avoided else other
