"""Follows the load that an engine publishes by itself, on a ZMQ socket for each rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from kvrouter.engines.events.zmq_frames import EventMessage, MalformedMessage
from kvrouter.engines.relay.engine_sockets import Disconnected, Endpoints, EngineSockets
from kvrouter.v1.events_pb2 import LoadReport

_HIGH_WATER_MARK = 64
"""Messages that wait in a socket: only the latest of them matters."""
_SILENT_SECONDS = 5.0
"""Time without a message after which a load is unknown; SGLang publishes an unchanged one every second."""


class PushedLoads:
    """The latest load of each rank. Create it with ``following``."""

    def __init__(self, read: Callable[[bytes], tuple[int, LoadReport]]) -> None:
        """``read`` decodes a message into rank and load; it raises MalformedMessage."""
        self._read = read
        self._changed = asyncio.Event()
        self.loads: dict[int, LoadReport] = {}
        """Loads by rank; a rank that is silent is left out."""
        self._unusable = 0
        self._disconnections = 0

    async def changed(self) -> None:
        """Returns when something has come or has become unknown since the last return."""
        await self._changed.wait()
        self._changed.clear()

    def take_unusable(self) -> int:
        """Returns how many messages could not be used since the last call."""
        count, self._unusable = self._unusable, 0
        return count

    def take_disconnections(self) -> int:
        """Returns how often a publisher was lost since the last call."""
        count, self._disconnections = self._disconnections, 0
        return count

    async def follow(self, dp_rank: int, sockets: EngineSockets) -> None:
        """Follows one rank until cancelled."""
        while True:
            try:
                async with asyncio.timeout(_SILENT_SECONDS):
                    received = await sockets.next()
            except TimeoutError:
                self._forget(dp_rank)
                continue
            if isinstance(received, Disconnected):
                self._disconnections += 1
                self._forget(dp_rank)
            elif isinstance(received, MalformedMessage):
                self._unusable += 1
                self._changed.set()
            elif isinstance(received, EventMessage):
                self._take(dp_rank, received.payload)

    def _take(self, dp_rank: int, payload: bytes) -> None:
        try:
            rank, load = self._read(payload)
            if rank != dp_rank:
                raise MalformedMessage(f"expected the load of rank {dp_rank}, received that of rank {rank}")
        except MalformedMessage:
            self._unusable += 1
        else:
            self.loads[dp_rank] = load
        self._changed.set()

    def _forget(self, dp_rank: int) -> None:
        self.loads.pop(dp_rank, None)
        self._changed.set()


@asynccontextmanager
async def following(
    sockets: Mapping[int, Endpoints], read: Callable[[bytes], tuple[int, LoadReport]]
) -> AsyncIterator[PushedLoads]:
    """Follows the load of all ranks while the context lasts.

    Raises:
        EndpointRefused: an endpoint is invalid.
    """
    pushed = PushedLoads(read)
    async with AsyncExitStack() as stack:
        opened = {
            dp_rank: await stack.enter_async_context(
                EngineSockets(endpoints, high_water_mark=_HIGH_WATER_MARK, replay_seconds=_SILENT_SECONDS)
            )
            for dp_rank, endpoints in sockets.items()
        }
        tasks = [asyncio.create_task(pushed.follow(dp_rank, each)) for dp_rank, each in opened.items()]
        try:
            yield pushed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
