"""The session that owns a client's bookings."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import aclosing, suppress

from kvrouter.client.calls import Calls
from kvrouter.client.errors import KvRouterError
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.frontend_pb2 import KeepSessionRequest, ReleaseRequest
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    wait_random_exponential,
)

log = logging.getLogger("kvrouter.client")

_RELEASE_SECONDS = 5.0
"""Deadline of the releases at the end. Bookings that are left then end with the session."""


class BookingSession:
    """Keeps a session open from the first booking on. The bookings of a process that dies end with it."""

    def __init__(self, calls: Calls, name: str) -> None:
        self.id = secrets.token_hex(16)
        """Id of the session."""
        self._calls = calls
        self._name = name
        self._keys: dict[str, BookingKey] = {}
        self._keeping: asyncio.Task[None] | None = None
        self._releasing: set[asyncio.Task[None]] = set()

    def key(self, request_id: str) -> BookingKey | None:
        """Returns the key of a live booking; None if there is none."""
        return self._keys.get(request_id)

    def book(self, request_id: str) -> BookingKey:
        """Returns the key for a booking. A suffix makes it unique, so that an id may be used again."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="kvrouter session")
        key = self._keys[request_id] = BookingKey(request_id=f"{request_id}~{secrets.token_hex(7)}")
        return key

    def forget(self, request_id: str) -> BookingKey | None:
        """Ends a booking here, and returns its key; None if there is none."""
        return self._keys.pop(request_id, None)

    def abandon(self, request_id: str) -> None:
        """Releases a booking in the background, because the call that makes it failed with an unknown outcome."""
        key = self.forget(request_id)
        if key is not None:
            task = asyncio.create_task(self._release(key))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Releases all bookings and ends the session."""
        for request_id in list(self._keys):
            self.abandon(request_id)
        if self._releasing:
            await asyncio.wait(self._releasing)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    async def _release(self, key: BookingKey) -> None:
        with suppress(KvRouterError):
            await self._calls.unary("Release", ReleaseRequest(booking=key), _RELEASE_SECONDS)

    async def _keep(self) -> None:
        def warn(state: RetryCallState) -> None:
            failure = state.outcome and state.outcome.exception()
            log.warning("the session ended, opening it again: %s", failure)

        request = KeepSessionRequest(session_id=self.id, client_name=self._name)
        retry = retry_if_exception_type(KvRouterError) | retry_if_result(lambda _: True)
        async for attempt in AsyncRetrying(
            retry=retry, wait=wait_random_exponential(multiplier=0.1, max=2), after=warn
        ):
            with attempt:
                async with aclosing(self._calls.stream("KeepSession", request, None)) as opened:
                    async for _ in opened:
                        pass
