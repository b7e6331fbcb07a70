"""A bidirectional call that ends when its server drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvrouter.runtime.errors import Draining


class DrainableSession:
    """Ends a session, but never during a write, because gRPC cannot send the status then."""

    def __init__(self) -> None:
        self._limit = asyncio.timeout(None)
        self._waiting = False
        self._ended = False

    def end(self) -> None:
        """Ends the session with ``Draining``."""
        self._ended = True
        if self._waiting:
            self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Lets ``end`` interrupt the wait for a response.

        Raises:
            Draining: the session was ended.
        """
        try:
            async with self._limit:
                yield
        except TimeoutError:
            if not self._limit.expired():
                raise
            raise Draining from None

    async def next_of(self, responses: AsyncGenerator[Any, None]) -> Any | None:
        """Returns the next response; None if there is none.

        Raises:
            Draining: the session was ended.
        """
        if not self._ended:
            self._waiting = True
            response = await anext(responses, None)
            self._waiting = False
        if self._ended:
            raise Draining
        return response
