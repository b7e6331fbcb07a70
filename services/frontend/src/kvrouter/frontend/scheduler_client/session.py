"""One opening of a link's session."""

from __future__ import annotations

import asyncio

from kvrouter.frontend.scheduler_client.connections import SchedulerConnection


class Session:
    """An opening of the session at one Scheduler, from the attempt to its end."""

    def __init__(self, connection: SchedulerConnection) -> None:
        """``connection`` is that to the Scheduler."""
        self.connection = connection
        self.unanswered = 0
        """Number of calls with updates that are not answered."""
        self.selections: set[asyncio.Timeout] = set()
        """The time limits of the selections under way."""
        self._ended = asyncio.Event()
        self._cause = ""

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended."""
        return self._ended.is_set()

    async def ended(self) -> str:
        """Returns when the session has ended, with the cause."""
        await self._ended.wait()
        return self._cause

    def end(self, cause: str) -> None:
        """Ends the session and the selections under way, which are repeated in the next session."""
        if self._ended.is_set():
            return
        self._cause = cause
        self._ended.set()
        now = asyncio.get_running_loop().time()
        for selection in self.selections:
            if not selection.expired():
                selection.reschedule(now)
