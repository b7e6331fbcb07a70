"""A response as a stream: how it begins and ends, and the output its client does not read."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

import msgspec
from kvrouter.frontend.edge.event_stream import EventStream, named_event, too_much_unread
from kvrouter.frontend.edge.frame import Piece, ResponseFrame, migration_notice
from kvrouter.frontend.request.routed import Routed
from kvrouter.net.calls.limits import MAX_UNREAD_BYTES


class ResponseStream:
    """Writes the events of one response. ``close`` must follow."""

    def __init__(self, frame: ResponseFrame, events: EventStream) -> None:
        self._frame = frame
        self._events = events
        self._write_now = events.write_event
        self._keeps = True
        """Whether output the client does not read is kept. Otherwise its source waits for the client."""
        self._head = b""
        """The beginning of each chunk: the fields before its choices."""
        self._notices: dict[int, bytes] = {}
        """Field of the next chunk of each sequence that has migrated."""
        self._unread: list[bytes] = []
        """Kept events."""
        self._unread_bytes = 0
        self._flushing: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """Writes the rest of the response."""
        if self._flushing is not None:
            await self._flushing
        if self._frame.request.includes_usage:
            self._events.write_event(self._frame.whole([]))
        self._events.write_event(b"[DONE]")
        self._events.end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the response with an error. The connection is closed, since a client may not have read it."""
        self._events.write_event(msgspec.json.encode(body))
        self._events.end(close=self._flushing is not None)

    def close(self) -> None:
        """Drops the output the client has not read."""
        if self._flushing is not None:
            self._flushing.cancel()

    def _write(self, event: bytes) -> None:
        """Writes an event, or keeps it while the client does not read.

        Raises:
            TooLarge: the client has left too much unread.
        """
        if self._keeps and self._must_keep:
            self._unread.append(event)
            self._kept(len(event))
        else:
            self._write_now(event)

    def _write_kept(self) -> None:
        """Writes the kept output."""
        events, self._unread = self._unread, []
        for event in events:
            self._write_now(event)

    @property
    def _must_keep(self) -> bool:
        """Whether further output is to be kept, since the client does not read."""
        return self._flushing is not None or self._events.is_full

    def _place(self, index: int, routing: Routed) -> None:
        """Adds where a sequence runs."""
        self._frame.routed(index, routing)
        if notice := migration_notice(routing):
            self._notices[index] = notice
        if not self._head:
            self._events.add_headers(self._frame.headers)
            self._head = msgspec.json.encode(self._frame.envelope())[:-1]

    def _kept(self, size: int) -> None:
        """Counts kept output, and writes it when the client reads again.

        Raises:
            TooLarge: the client has left too much unread.
        """
        self._unread_bytes += size
        if self._unread_bytes > MAX_UNREAD_BYTES:
            raise too_much_unread(self._unread_bytes)
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            await self._events.drain()
        except ConnectionError:
            return  # aiohttp cancels the handler.
        self._flushing, self._unread_bytes = None, 0
        self._write_kept()


class NamedEvents(ResponseStream, ABC):
    """A ChoiceSink of one sequence writing each piece as events when it arrives. ``close`` must follow."""

    def __init__(self, frame: ResponseFrame, events: EventStream, *, keeps: bool) -> None:
        super().__init__(frame, events)
        self._write_now = events.write_bytes
        self._keeps = keeps
        self._has_begun = False

    def routed(self, index: int, routing: Routed) -> None:
        """Adds where the sequence runs."""
        self._frame.routed(index, routing)
        if not self._events.begun:
            self._events.add_headers(self._frame.headers | {"request-id": routing.request_id})

    def add(self, index: int, piece: Piece) -> None:  # noqa: ARG002 - there is one sequence
        """Writes a piece of the sequence.

        Raises:
            TooLarge: the client has left too much unread.
        """
        if not self._has_begun:
            self._has_begun = True
            self._begin()
        self._piece(piece)

    @abstractmethod
    def grow(self, text: bytes) -> None:
        """Adds a text, as JSON, to what the last piece has made grow, and nothing else.

        Raises:
            TooLarge: the client has left too much unread.
        """

    async def end(self) -> None:
        """Writes the rest of the response."""
        if self._flushing is not None:
            await self._flushing
        self._finish()
        self._events.end()

    def fail(self, body: dict[str, Any]) -> None:
        """Ends the response with an error, given as the OpenAI API has it. The connection is closed if it is full."""
        full = self._flushing is not None
        self._unread.clear()
        for event in self._failure(body):
            self._events.write_bytes(event)
        self._events.end(close=full)

    @abstractmethod
    def _begin(self) -> None:
        """Writes the events before the output."""

    @abstractmethod
    def _piece(self, piece: Piece) -> None:
        """Writes the events of a piece."""

    @abstractmethod
    def _finish(self) -> None:
        """Writes the events after the output."""

    @abstractmethod
    def _failure(self, body: dict[str, Any]) -> list[bytes]:
        """Returns the last events of a response that failed."""

    def _write_named(self, name: str, fields: dict[str, Any]) -> None:
        """Writes an event, whose data repeats its name as its type."""
        self._write(named_event(name, fields))
