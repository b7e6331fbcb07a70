"""A response as a stream of named events, the form of Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import msgspec
from kvrouter.frontend.edge.choice import Piece
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.response_stream import ResponseStream
from kvrouter.v1.frontend_pb2 import RoutingInfo


class NamedEvents(ResponseStream):
    """A ChoiceSink of one sequence writing each piece as events when it arrives. ``close`` must follow."""

    def __init__(self, frame: ResponseFrame, events: EventStream) -> None:
        super().__init__(frame, events)
        self._unread: list[bytes] = []
        self._has_begun = False

    def routed(self, index: int, routing: RoutingInfo) -> None:
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

    def _write(self, name: str, fields: dict[str, Any]) -> None:
        """Writes an event, whose data repeats its name as its type."""
        event = named_event(name, fields)
        if self._must_keep:
            self._unread.append(event)
            self._kept(len(event))
        else:
            self._events.write_bytes(event)

    def _write_kept(self) -> None:
        events, self._unread = self._unread, []
        for event in events:
            self._events.write_bytes(event)


def named_event(name: str, fields: dict[str, Any]) -> bytes:
    """Returns an event, whose data repeats its name as its type."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name} | fields))
