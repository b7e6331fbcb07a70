"""The response of a forwarded request: an engine's, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web
from kvrouter.frontend.edge.event_stream import EventStream, StepWriter
from kvrouter.frontend.edge.frame import routing_headers
from kvrouter.frontend.edge.http_errors import error_event
from kvrouter.frontend.edge.middlewares import cross_origin_headers
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.frontend_pb2 import RoutedOn, RoutingInfo


class ForwardedResponse:
    """An OutputReceiver passing on the bytes of each piece. Nothing is kept: engines wait for ``drain``."""

    def __init__(self, request: web.Request, writer: StepWriter, routed_on: RoutedOn) -> None:
        """``routed_on`` is the decision's knowledge of the prompt."""
        self.headers: dict[str, str] = {}
        """Headers the response has besides the engine's."""
        self.stream: EventStream | None = None
        """The response as aiohttp gets it; None until an engine answers."""
        self._request = request
        self._writer = writer
        self._routed_on = routed_on

    @property
    def has_begun(self) -> bool:
        """Whether its first byte was written."""
        return self.stream is not None and self.stream.begun

    def routed(self, routing: RoutingInfo) -> None:
        """Adds where the request runs."""
        if not routing.load_only:
            routing.routed_on = self._routed_on
        self.headers |= routing_headers(routing)

    def answers(self, status: int, reason: str, headers: Mapping[str, str]) -> None:
        """Takes the head of an engine's response. It is written with the first byte."""
        headers = {**headers, **self.headers, **cross_origin_headers(self._request)}
        self.stream = EventStream(self._request, self._writer, status=status, reason=reason, headers=headers)

    def output(self, output: Output) -> None:
        """Writes a piece."""
        if self.stream is not None and output.raw:
            self.stream.write_bytes(output.raw)

    async def drain(self) -> None:
        """Returns when the client has read most of the response.

        Raises:
            ConnectionError: it disconnected.
        """
        if self.stream is not None:
            await self.stream.drain()

    async def end(self) -> None:
        """Ends the response."""
        if self.stream is not None:
            self.stream.end()

    def close(self) -> None:
        """Drops output the client has not read; nothing is kept here."""

    def engine_error(self, error: web.Response) -> web.Response:
        """Returns an engine's response to a failed request for the client."""
        return error

    def fail(self, error: dict[str, Any]) -> None:
        """Ends a begun response: a stream of events with an error as its last event.

        For any other response the connection is closed, since no byte can say that it ended early.
        """
        stream, transport = self.stream, self._request.transport
        if stream is None or transport is None:
            return
        if stream.is_events:
            # The empty line ends an event of which only a part has arrived.
            stream.write_bytes(b"\n\n" + error_event(self._request.path, error))
            stream.end()
        else:
            transport.abort()
