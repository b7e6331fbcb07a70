"""Bootstrap rooms, in which a prefill and a decode server meet for one request.

A prefill server waits for the decode server before it computes a prompt, as SGLang does, so both legs must be sent at
the same time. No blocks are transferred: the decode server waits for the prefill, then computes the prompt by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp
from aiohttp import web
from kvrouter.mocker.serving.errors import ApiError
from kvrouter.runtime.http_server import HttpLimits, serving_http
from prometheus_client import CollectorRegistry

TIMEOUT_SECONDS = 300.0
"""Time for which a leg waits for the other one, SGLang's default."""
_MAX_CONNECTIONS = 4096
_HEADER_SECONDS = 10.0


class _Room:
    def __init__(self) -> None:
        self.legs = 0
        """Legs that are in the room."""
        self.joined = asyncio.Event()
        """Set when the decode server has come."""
        self.left = asyncio.Event()
        """Set when the prefill server has computed the prompt, or has failed to."""
        self.is_prefilled = False


class PrefillRooms:
    """The rooms of a prefill server, which decode servers join by HTTP."""

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}

    @asynccontextmanager
    async def serving(self, host: str, port: int, registry: CollectorRegistry) -> AsyncIterator[int]:
        """Serves the rooms while the context lasts; yields the port. Port 0 takes a free one.

        Raises:
            BindFailed: the address cannot be listened on.
        """
        application = web.Application()
        application.add_routes([web.get("/rooms/{room:[0-9]+}", self.join)])
        limits = HttpLimits(_MAX_CONNECTIONS, _HEADER_SECONDS)
        async with serving_http(
            application, host, port, limits, registry, name="bootstrap", handler_cancellation=True, shutdown_timeout=1.0
        ) as (_, bound):
            yield bound

    @asynccontextmanager
    async def prefill(self, number: int) -> AsyncIterator[None]:
        """Waits for the decode server, and lets it begin when the body has computed the prompt.

        Raises:
            ApiError: no decode server has come in time.
        """
        with self._in_room(number) as room:
            try:
                await _wait(room.joined, f"no decode server has joined bootstrap room {number}")
                yield
                room.is_prefilled = True
            finally:
                room.left.set()

    async def join(self, request: web.Request) -> web.Response:
        """Returns 200 when the prompt is computed, 500 if that fails."""
        number = int(request.match_info["room"])
        with self._in_room(number) as room:
            room.joined.set()
            try:
                await _wait(room.left, f"no prefill has come to bootstrap room {number}")
            except ApiError as error:
                return web.Response(status=error.status, text=str(error))
            return web.Response(status=200 if room.is_prefilled else 500)

    @contextmanager
    def _in_room(self, number: int) -> Iterator[_Room]:
        room = self._rooms.setdefault(number, _Room())
        room.legs += 1
        try:
            yield room
        finally:
            room.legs -= 1
            if not room.legs:
                del self._rooms[number]


async def await_prefill(host: str, port: int, room: int) -> None:
    """Returns when the prefill server has computed the prompt.

    Raises:
        ApiError: it does not answer, or has not computed it.
    """
    url = f"http://{host}:{port}/rooms/{room}"
    try:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            if response.status != 200:
                raise ApiError(500, f"KVTransferError: {url} answered {response.status}")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ApiError(500, f"KVTransferError: {url} does not answer: {error}") from None


async def _wait(event: asyncio.Event, failure: str) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await event.wait()
    except TimeoutError:
        raise ApiError(500, f"KVTransferError: {failure}") from None
