"""The response of a forwarded request: an engine's, byte for byte, or translated back from a chat as it arrives."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web
from kvrouter.core import ChunkWriter
from kvrouter.frontend.edge.event_stream import STREAM_TYPE, EventStream, StepWriter
from kvrouter.frontend.edge.frame import ResponseFrame, routing_headers
from kvrouter.frontend.edge.http_errors import error_event, shaped_error
from kvrouter.frontend.edge.middlewares import cross_origin_headers
from kvrouter.frontend.edge.request_fields import SharedFields
from kvrouter.frontend.edge.response_stream import NamedEvents
from kvrouter.frontend.edge.text_request import TextRequest
from kvrouter.frontend.edge.translated_request import TranslatedRequest
from kvrouter.frontend.proxy.engine_chat import ChunkPattern, piece_of, read_answer
from kvrouter.frontend.proxy.engine_response import MALFORMED, EventReader, Usage, data_of
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.workers.output import Output
from kvrouter.v1.errors import DependencyAway
from kvrouter.v1.frontend_pb2 import RoutedOn
from multidict import CIMultiDict


class ForwardedResponse:
    """An OutputReceiver passing on the bytes of each piece. Nothing is kept: engines wait for ``drain``."""

    stream: EventStream | None = None
    """The response as aiohttp gets it; None until an engine answers."""
    _chunk_writer: ChunkWriter | None = None

    def __init__(self, request: web.Request, writer: StepWriter, routed_on: RoutedOn) -> None:
        """``routed_on`` is the decision's knowledge of the prompt."""
        self.headers: dict[str, str] = {}
        """Headers the response has besides the engine's."""
        self._request = request
        self._writer = writer
        self._routed_on = routed_on

    @property
    def has_begun(self) -> bool:
        """Whether its first byte was written."""
        return self.stream is not None and self.stream.begun

    def routed(self, routing: Routed) -> None:
        """Adds where the request runs."""
        if not routing.load_only:
            routing.routed_on = self._routed_on
        self.headers |= routing_headers(routing)

    def answers(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:
        """Takes the head of an engine's response. It is written with the first byte."""
        varies = headers.popall("Vary", [])
        headers.update(self.headers, **cross_origin_headers(self._request))
        headers.extend(("Vary", names) for names in varies)  # Besides the origin.
        self.stream = EventStream(self._request, self._writer, status=status, reason=reason, headers=headers)
        self._chunk_writer = None

    def output(self, output: Output) -> ChunkWriter | None:
        """Writes a piece. Returns the writer of further chunks of a stream, if the client gets any."""
        stream = self.stream
        if stream is None:
            return None
        if output.raw:
            stream.write_bytes(output.raw)
        if self._chunk_writer is None and stream.is_events:
            self._chunk_writer = stream.chunk_writer()
        return self._chunk_writer

    async def drain(self) -> None:
        """Returns when the client has read most of the response.

        Raises:
            ConnectionError: it disconnected.
        """
        if self.stream is not None and self.stream.is_full:
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


_OK = 200
_MAX_BYTES = 16 << 20
"""Maximum size of a whole response, or of one event: both are translated when they are complete."""


class TranslatedResponse(ForwardedResponse):
    """An OutputReceiver translating an engine's chat. Of a stream nothing is kept: engines wait for ``drain``."""

    def __init__(
        self,
        request: web.Request,
        writer: StepWriter,
        routed_on: RoutedOn,
        translated: TranslatedRequest,
        prompt: bytes,
    ) -> None:
        """Creates it.

        Args:
            request: The request.
            writer: Writes the response.
            routed_on: The decision's knowledge of the prompt.
            translated: The request as a chat.
            prompt: Its prompt as packed token ids, or what stands for them until the engine reports its usage.
        """
        super().__init__(request, writer, routed_on)
        self._translated = translated
        fields = SharedFields(model=translated.chat["model"], stream=bool(translated.chat.get("stream")))
        self._frame = ResponseFrame(TextRequest(fields, [], None, is_chat=True), None, [prompt])
        self._status = _OK
        self._events: NamedEvents | None = None
        self._reader = EventReader()
        self._pattern = ChunkPattern()
        self._body = bytearray()
        self._failed = False

    def routed(self, routing: Routed) -> None:
        """Adds where the request runs."""
        super().routed(routing)
        self._frame.routed(0, routing)

    def answers(self, status: int, reason: str, headers: CIMultiDict[str]) -> None:  # noqa: ARG002
        """Takes the head of an engine's response, unless one of an earlier engine was written."""
        if self.has_begun:
            return
        self._status = status
        self._body.clear()
        self._reader, self._pattern, self._events, self.stream = EventReader(), ChunkPattern(), None, None
        if status == _OK and headers.get("Content-Type", "").startswith(STREAM_TYPE):
            self.stream = EventStream(self._request, self._writer)
            named = {"request-id": self._frame.request_id}
            self.stream.add_headers(self.headers | named | cross_origin_headers(self._request))
            self._events = self._translated.streamed(self._frame, self.stream, keeps=False)

    def output(self, output: Output) -> None:
        """Translates a piece.

        Raises:
            DependencyAway: it is no chat, or too long.
        """
        events, raw = self._events, output.raw
        if events is None:
            self._body += raw
        elif text := self._pattern.text_of(raw):
            events.grow(text)
            return
        else:
            for event in self._reader.take(raw):
                self._take(event, events)
            if len(self._reader):
                self._pattern.forget()  # What comes next is no whole event.
        if len(self._body) + len(self._reader) > _MAX_BYTES:
            raise DependencyAway(f"its OpenAI API answers with more than {_MAX_BYTES} bytes at once")

    async def end(self) -> None:
        """Ends the response."""
        if self._failed:
            return
        if self._events is not None:
            await self._events.end()
            return
        body = bytes(self._body)
        headers = self.headers | cross_origin_headers(self._request) | {"Content-Type": "application/json"}
        if self._status == _OK:
            body = self._whole(body)
            headers["request-id"] = self._frame.request_id
        else:
            body = self._error(body, self._status)
        headers["Content-Length"] = str(len(body))
        self.stream = EventStream(self._request, self._writer, status=self._status, headers=headers)
        self.stream.write_bytes(body)
        self.stream.end()

    def fail(self, error: dict[str, Any]) -> None:
        """Ends a begun response with an error."""
        if self._events is not None and not self._failed:
            self._failed = True
            self._pattern.forget()
            self._events.fail(error)

    def close(self) -> None:
        """Drops the output the client has not read."""
        if self._events is not None:
            self._events.close()

    def engine_error(self, error: web.Response) -> web.Response:
        """Returns an engine's response to a failed request for the client."""
        body = self._error(error.body if isinstance(error.body, bytes) else b"", error.status)
        headers = {name: value for name, value in error.headers.items() if name.lower() != "content-length"}
        return web.Response(status=error.status, body=body, headers=headers)

    def _take(self, event: bytes, events: NamedEvents) -> None:
        if text := self._pattern.text_of(event):
            events.grow(text)
            return
        data = data_of(event)
        if self._failed or not data.startswith(b"{"):
            return  # A comment, or the end.
        answer = read_answer(data)
        if answer.usage is not None:
            self._count(answer.usage)
        if answer.error is not None:
            self.fail({"error": answer.error} if isinstance(answer.error, dict) else {"error": {}})
        elif answer.choices:
            events.add(0, piece_of(answer.choices[0]))
            self._pattern.learn(event, answer)

    def _whole(self, body: bytes) -> bytes:
        answer = read_answer(body)
        if answer.usage is not None:
            self._count(answer.usage)
        if not answer.choices:
            raise DependencyAway("its OpenAI API answers a chat without a choice")
        sink = self._translated.whole(self._frame)
        sink.add(0, piece_of(answer.choices[0]))
        return sink.body()

    def _count(self, usage: Usage) -> None:
        count = self._frame.counts[0]
        count.prompt_tokens = count.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        count.output_tokens = usage.completion_tokens or 0
        count.cached_tokens = usage.cached_tokens

    def _error(self, body: bytes, status: int) -> bytes:
        """Returns the engine's error in the form of the client's API."""
        try:
            error = msgspec.json.decode(body, type=dict[str, Any])
        except MALFORMED:
            error = {}
        if not isinstance(error.get("error"), dict):
            error = {"error": {"message": f"the engine answers {status}", "type": "invalid_request_error"}}
        shown = shaped_error(self._translated.path, error, status, self._frame.request_id)
        return msgspec.json.encode(shown)
