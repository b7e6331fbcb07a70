"""Where the Schedulers of components are to be had."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvrouter.runtime.contracts import Scheduler
from kvrouter.v1.names import ComponentName


class SchedulerSource(Protocol):
    """Picks Schedulers. ``kvrouter.frontend.scheduler_client.rendezvous`` has those that there are."""

    def pick(
        self, component: ComponentName, avoid: Collection[str] = (), shard: int = 0
    ) -> tuple[str, Scheduler] | None:
        """The id of the component's Scheduler, and the object or stub; None where none is live.

        Those to ``avoid`` are picked only where there is no other. ``shard`` 0 is the whole component.
        """
        ...

    def everyone(self) -> list[Scheduler]:
        """Every Scheduler that may be picked."""
        ...

    def count(self) -> int:
        """How many Schedulers may be picked."""
        ...

    def is_live(self, scheduler_id: str) -> bool:
        """Whether a Scheduler of that id may be picked."""
        ...

    async def changed(self) -> None:
        """Returns when ``pick`` may give another answer."""
        ...
