"""Keeps the sessions of clients open at every Scheduler, so the bookings of a client that dies are freed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from kvrouter.runtime.contracts import Immediate, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.errors import BadRequest, DependencyAway, KvRouterError, SessionLost
from kvrouter.v1.frontend_pb2 import KeepSessionRequest

T = TypeVar("T")

_HEARTBEAT_SECONDS = 2.0
"""Interval of heartbeats: a fifth of the silence after which a Scheduler closes a session."""
_CALL_SECONDS = 2.0
"""Deadline of each call to a Scheduler."""
_MAX_ID_BYTES = 128
_MAX_NAME_BYTES = 64


def scheduler_session_id(session_id: str) -> str:
    """Returns the id a client's session has at the Schedulers, which differs from those of Frontends.

    Raises:
        BadRequest: the id is empty or too long.
    """
    size = len(session_id.encode())
    if not 1 <= size <= _MAX_ID_BYTES:
        raise BadRequest(
            f"expected a session id of 1 to {_MAX_ID_BYTES} bytes, received {size}",
            field="session_id",
            advice="Send a random id, unique among clients.",
        )
    return f"client~{session_id}"


async def open_session(scheduler: Scheduler, session_id: str, client_name: str = "") -> pb.OpenSessionResponse:
    """Opens a client's session at one Scheduler. Its bookings stay if it was open.

    Raises:
        KvRouterError: it was not opened.
    """
    request = pb.OpenSessionRequest(session_id=scheduler_session_id(session_id), client_name=client_name)
    return await _answer(scheduler.open_session(request, deadline=Deadline.after(_CALL_SECONDS)))


async def kept_session(
    request: KeepSessionRequest, schedulers: Callable[[], list[Scheduler]]
) -> AsyncGenerator[pb.OpenSessionResponse, None]:
    """Keeps a session open at every live Scheduler until the generator is closed.

    Yields a response when it is open, and again after a Scheduler opened it that did not know it, such as one that was
    restarted and has lost its bookings.

    Args:
        request: Names the session.
        schedulers: Returns the live Schedulers.

    Raises:
        BadRequest: the id or the name is invalid.
        DependencyAway: no Scheduler opened it.
    """
    session_id, name = request.session_id, request.client_name
    at_scheduler = scheduler_session_id(session_id)
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise BadRequest(
            f"client_name is longer than {_MAX_NAME_BYTES} bytes", field="client_name", advice="Send a shorter name."
        )

    async def heartbeat(scheduler: Scheduler) -> pb.OpenSessionResponse | None:
        """Returns the response of the opening if the Scheduler did not know the session; otherwise None."""
        update = pb.UpdateBookingsRequest(session_id=at_scheduler)
        try:
            await _answer(scheduler.update_bookings(update, deadline=Deadline.after(_CALL_SECONDS)))
        except SessionLost:
            return await open_session(scheduler, session_id, name)
        return None

    async def close(scheduler: Scheduler) -> None:
        closing = pb.CloseSessionRequest(session_id=at_scheduler)
        await _answer(scheduler.close_session(closing, deadline=Deadline.after(_CALL_SECONDS)))

    try:
        opened = await _at_each(schedulers(), lambda each: open_session(each, session_id, name))
        if not opened:
            raise DependencyAway("no Scheduler opened the session: check that one runs in this namespace")
        yield opened[0]
        while True:
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            opened_again = filter(None, await _at_each(schedulers(), heartbeat))
            if response := next(opened_again, None):
                yield response
    finally:
        await _at_each(schedulers(), close)


async def _at_each(schedulers: list[Scheduler], call: Callable[[Scheduler], Coroutine[Any, Any, T]]) -> list[T]:
    """Calls all Schedulers at once. Returns the answers of those that answered."""
    answers: list[T] = []

    async def settled(scheduler: Scheduler) -> None:
        with suppress(KvRouterError):
            answers.append(await call(scheduler))

    async with asyncio.TaskGroup() as group:
        for scheduler in schedulers:
            group.create_task(settled(scheduler))
    return answers


async def _answer(requested: Immediate[T]) -> T:
    return await requested if isinstance(requested, Awaitable) else requested
