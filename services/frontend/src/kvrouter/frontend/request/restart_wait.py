"""How long one request waits for a pool that restarts as a whole."""

from __future__ import annotations

import asyncio

from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.runtime.backoff import Backoff
from kvrouter.runtime.deadline import Deadline

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0
_ANSWER_SECONDS = 0.5
"""What is left of the deadline for the answer, so that the client learns why its request was not served."""


class RestartWait:
    """Waits between the attempts of one request, for a limited time in sum."""

    def __init__(self, limit_seconds: float) -> None:
        """Has not waited yet. ``limit_seconds`` is the longest time to wait in sum."""
        self.limit_seconds = limit_seconds
        self.has_lost_workers = False
        """Whether a worker died with the request, or refused the connection, so that it may be starting again."""
        self._waited = 0.0
        self._pauses = Backoff(_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)

    def failed(self, failure: WorkerFailure) -> None:
        """Notes why an attempt failed."""
        died = failure.fate is not None and failure.fate.died
        self.has_lost_workers = self.has_lost_workers or failure.not_sent or died

    async def pause(self, deadline: Deadline) -> bool:
        """Waits a moment. Returns False, at once, if the time for waiting or the request's deadline is over."""
        left = self.limit_seconds - self._waited
        if (until_deadline := deadline.remaining()) is not None:
            left = min(left, until_deadline - _ANSWER_SECONDS)
        if left <= 0:
            return False
        pause = min(self._pauses.failed(), left)
        self._waited += pause
        await asyncio.sleep(pause)
        return True
