"""The ZMQ sockets on which one rank of an engine publishes its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from kvrouter.engines.events.zmq_frames import (
    EventMessage,
    MalformedMessage,
    encode_sequence,
    read_published,
    read_replayed,
)
from kvrouter.net.budgets import loop_budget
from zmq.utils.monitor import parse_monitor_message

MAX_FRAME_BYTES = 64 << 20
"""Maximum size of a frame. The events of a step with a million stored tokens have about 10 MiB."""

HEARTBEAT_MS = 10_000
"""Interval of the pings by which a connection is found to be dead; three without an answer end it."""

_WILDCARDS = frozenset({"*", "0.0.0.0", "::", "[::]"})  # noqa: S104 - compared, not listened on
_QUEUED_MESSAGES = 1024
_RECEIVE_US = 40
"""CPU time to receive a message, microseconds. A socket with waiting messages does not return to the loop by itself."""
_SETTLE_SECONDS = 1.0
"""A publisher sends a new subscriber nothing until the subscription has reached it, shortly after the connection."""
_CONNECTION_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class EndpointRefused(Exception):
    """An endpoint cannot be listened on or connected to; the message names it."""


class ReplayFailed(Exception):
    """The engine does not answer a replay request, or with something else."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where one rank publishes."""

    events: str
    """PUB socket, tcp://host:port or ipc://path; a wildcard as the host is bound, for engines that connect."""
    replay: str = ""
    """ROUTER socket for replays; empty if the engine has none."""
    topic: str = ""
    """The only topic to follow; empty for all."""

    @classmethod
    def of_rank(cls, events: str, replay: str, topic: str, dp_rank: int) -> Endpoints:
        """Returns the endpoints of a rank, given rank 0's: engines add the rank to the port."""
        return cls(_shifted(events, dp_rank), _shifted(replay, dp_rank), topic)


def _shifted(endpoint: str, offset: int) -> str:
    if not offset or not endpoint.startswith("tcp://"):
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + offset}"


def _bound(socket: zmq.asyncio.Socket) -> None:
    """Disconnects from a peer with a frame of more than ``MAX_FRAME_BYTES``, or after it vanished."""
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 3 * HEARTBEAT_MS)


class Reconnected:
    """A publisher connected, for the first time or again."""


class Settled:
    """A publisher connected a while ago: the subscription has reached it."""


class Disconnected:
    """A publisher disconnected."""


Received = EventMessage | Reconnected | Settled | Disconnected | MalformedMessage


class EngineSockets:
    """Subscribes to one rank while the context lasts, and requests replays."""

    def __init__(self, endpoints: Endpoints, *, high_water_mark: int, replay_seconds: float) -> None:
        """Args:
        endpoints: Where the rank publishes.
        high_water_mark: Messages queued in the socket; further ones are lost, which shows as a gap.
        replay_seconds: Longest time between two messages of a replay.
        """  # noqa: D205
        self._endpoints = endpoints
        self._high_water_mark = high_water_mark
        self._replay_seconds = replay_seconds
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._monitor = self._events.get_monitor_socket(_CONNECTION_EVENTS)
        self._queue: asyncio.Queue[Received] = asyncio.Queue(_QUEUED_MESSAGES)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._events.set_hwm(self._high_water_mark)
        _bound(self._events)
        self._events.subscribe(self._endpoints.topic)
        events = self._endpoints.events
        try:
            if self._is_listening:
                self._events.bind(events)
            else:
                self._events.connect(events)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise EndpointRefused(f"{events}: {error}") from None
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._events.disable_monitor()
        self._context.destroy(linger=0)

    @property
    def _is_listening(self) -> bool:
        return urlsplit(self._endpoints.events).netloc.rpartition(":")[0] in _WILDCARDS

    @property
    def has_replay(self) -> bool:
        """Whether the engine can repeat messages."""
        return bool(self._endpoints.replay)

    async def next(self) -> Received:
        """Returns the next message or change of the connection."""
        return await self._queue.get()

    async def replay(self, first: int, *, wait_for_engine: bool = False) -> AsyncGenerator[EventMessage]:
        """Yields the engine's kept messages from ``first`` on, up to its newest.

        With ``wait_for_engine`` the first message may take any time, for a loading engine.

        Raises:
            ReplayFailed: the engine does not answer, or with something else.
        """
        # A REQ socket could read one answer only.
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.set_hwm(0)
            _bound(socket)
            socket.connect(self._endpoints.replay)
            await socket.send_multipart([b"", encode_sequence(first)])
            patience = None if wait_for_engine else self._replay_seconds
            while True:
                await loop_budget().turn(_RECEIVE_US)
                try:
                    async with asyncio.timeout(patience):
                        message = read_replayed(await socket.recv_multipart())
                except TimeoutError:
                    raise ReplayFailed(f"{self._endpoints.replay} sent nothing for {patience} s") from None
                except MalformedMessage as error:
                    raise ReplayFailed(f"{self._endpoints.replay}: {error}") from None
                if message is None:
                    return
                patience = self._replay_seconds
                yield message
        finally:
            socket.close(linger=0)

    async def _receive(self) -> None:
        topic = self._endpoints.topic.encode() or None
        while True:
            await loop_budget().turn(_RECEIVE_US)
            frames = await self._events.recv_multipart()
            try:
                message = read_published(frames, topic)
            except MalformedMessage as error:
                await self._queue.put(error)
            else:
                # A subscription also matches topics that begin with the chosen one.
                if message is not None:
                    await self._queue.put(message)

    async def _watch(self) -> None:
        with suppress(zmq.ZMQError):  # the monitor is closed with its socket
            while True:
                event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
                if event == zmq.Event.DISCONNECTED:
                    self._connect_again()
                    await self._queue.put(Disconnected())
                    continue
                await self._queue.put(Reconnected())
                asyncio.get_running_loop().call_later(_SETTLE_SECONDS, self._settle)

    def _connect_again(self) -> None:
        """Replaces an ended connection: after a frame beyond the limit the library does not try again by itself."""
        if self._is_listening:
            return
        with suppress(zmq.ZMQError):  # the library has given the endpoint up itself
            self._events.disconnect(self._endpoints.events)
        self._events.connect(self._endpoints.events)

    def _settle(self) -> None:
        # With a full queue messages do arrive, and show what is missing.
        with suppress(asyncio.QueueFull):
            self._queue.put_nowait(Settled())
