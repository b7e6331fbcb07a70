"""One session with a Scheduler. Its calls that are answered at once need no task and no timer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from kvrouter.frontend.schedulers.scheduler_connection import SchedulerConnection
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

_Result = TypeVar("_Result")


@coroutine
def rest_of(call: Coroutine[Any, Any, _Result], waits_for: Any) -> Generator[Any, Any, _Result]:
    """Waits, and runs the steps of a coroutine after its first one. Returns its result.

    ``waits_for`` is the result of its first step, which ``send`` has run.
    """
    try:
        while True:
            failure: BaseException | None = None
            try:
                received = yield waits_for
            except BaseException as error:  # cancellation included: the coroutine decides about it
                failure = error
            try:
                waits_for = call.send(received) if failure is None else call.throw(failure)
            except StopIteration as ended:
                result: _Result = ended.value
                return result
            finally:
                del failure  # Its traceback refers to this frame.
    finally:
        del waits_for  # So does that of its exception.


class SelectionUnanswered(Exception):
    """The session has ended, or the deadline of a selection has passed."""


class Session:
    """An opening of the session at one Scheduler, from the attempt to its end."""

    def __init__(self, connection: SchedulerConnection) -> None:
        """``connection`` is that to the Scheduler."""
        self.connection = connection
        self.unanswered = 0
        """Number of calls with unanswered updates."""
        self.has_ended = False
        self._waiting: set[asyncio.Timeout] = set()
        """The time limits of the selections waiting for the Scheduler."""
        self._ended = asyncio.Event()
        self._cause = ""

    async def answer(
        self, selection: Coroutine[Any, Any, SelectWorkerResponse], seconds: float | None
    ) -> SelectWorkerResponse:
        """Runs a selection while the session lasts. A Scheduler in this process mostly answers without waiting.

        Args:
            selection: The call, which has not begun.
            seconds: Time for it; None for no limit.

        Raises:
            SelectionUnanswered: the session or the time ended first.
            KvRouterError: raised by the selection.
        """
        try:
            waits_for = selection.send(None)
        except StopIteration as ended:
            selected: SelectWorkerResponse = ended.value
            return selected
        limit = asyncio.timeout(0 if self.has_ended else seconds)
        try:
            async with limit:
                self._waiting.add(limit)
                try:
                    return await rest_of(selection, waits_for)
                finally:
                    self._waiting.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SelectionUnanswered from None
        finally:
            del limit, waits_for  # They refer to the task, whose exception's traceback refers to this frame.

    async def ended(self) -> str:
        """Returns when the session has ended, with the cause."""
        await self._ended.wait()
        return self._cause

    def end(self, cause: str) -> None:
        """Ends the session and the selections under way, which are repeated in the next session."""
        if self.has_ended:
            return
        self.has_ended = True
        self._cause = cause
        self._ended.set()
        now = asyncio.get_running_loop().time()
        for limit in self._waiting:
            if not limit.expired():
                limit.reschedule(now)
