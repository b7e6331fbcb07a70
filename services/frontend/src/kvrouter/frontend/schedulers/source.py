"""The interface by which links find Schedulers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvrouter.frontend.schedulers.connections import SchedulerConnection
from kvrouter.runtime.contracts import Scheduler
from kvrouter.v1.names import ComponentName


class SchedulerSource(Protocol):
    """Picks Schedulers. ``kvrouter.frontend.schedulers.rendezvous`` has the implementations."""

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, SchedulerConnection] | None:
        """Returns id and connection of the component's Scheduler; None if none is live.

        A Scheduler in ``avoid`` is picked only if there is no other. ``shard`` 0 is the whole component.
        """
        ...

    def everyone(self) -> list[Scheduler]:
        """Returns every Scheduler that may be picked."""
        ...

    def count(self) -> int:
        """Returns how many Schedulers may be picked."""
        ...

    def is_live(self, scheduler_id: str) -> bool:
        """Returns whether the Scheduler may be picked."""
        ...

    async def changed(self) -> None:
        """Returns when ``pick`` may return another Scheduler."""
        ...
