"""One HTTP request at a gateway, from its headers to the end of its response: one stream of external processing.

The gateway sends the request's headers and body, and waits. The picker holds them until the body is complete, books a
rank, and returns headers naming its endpoint, then the body. The response passes through piece by piece. The stream
ends early if the client disconnects or the gateway dies; the booking is freed whenever it ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest
from kvrouter.core import PassedStream
from kvrouter.engines.fields import NEVER_QUOTED
from kvrouter.frontend.edge.event_stream import STREAM_TYPE
from kvrouter.frontend.edge.frame import KV_SOURCE_HEADER
from kvrouter.frontend.proxy.endpoint_picker import responses
from kvrouter.frontend.proxy.endpoint_picker.engines import Pick
from kvrouter.frontend.proxy.endpoint_picker.gateway_request import GatewayRequest
from kvrouter.frontend.proxy.endpoint_picker.picker import Picker
from kvrouter.frontend.proxy.endpoint_picker.responses import code_details, header_list, served_endpoint
from kvrouter.frontend.proxy.engine_response import EngineResponse, count_tokens
from kvrouter.net.http2 import ReceivedCall
from kvrouter.v1.errors import BadRequest, DependencyAway, KvRouterError
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.texts import rank_text, text_of
from prometheus_client import CollectorRegistry, Counter, Gauge


class PickerMetrics:
    """Metrics of the endpoint picker."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvrouter_endpoint_picker_requests",
            "Requests of gateways by gRPC code: OK when the response ended, CANCELLED when the client disconnected.",
            ["code"],
            registry=registry,
        )
        self.fallbacks = Counter(
            "kvrouter_endpoint_picker_fallbacks",
            "Requests that another endpoint served than the chosen one.",
            registry=registry,
        )
        self.running = Gauge(
            "kvrouter_endpoint_picker_running_requests", "Requests of gateways in progress.", registry=registry
        )


_REQUEST_BODY_MODES = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED)
"""Modes in which the picker can change a response."""
_SHORT_SECONDS = 0.25
"""Time for a choice after which the gateway is asked for more, which else soon goes on without a choice."""


_HEADERS = "request_headers"
_OF_REQUEST = (_HEADERS, "request_body", "request_trailers")


class _GatewayLeft(Exception):
    """The gateway ended the stream: the client disconnected."""


class Exchange:
    """One request and its response. Call ``open`` first, and ``run`` once."""

    def __init__(self, context: ReceivedCall, picker: Picker, metrics: PickerMetrics) -> None:
        self._context = context
        context.serialize = None  # The answers are encoded.
        self._metrics = metrics
        self._request = GatewayRequest(picker)
        self._timeout_seconds = picker.settings.request_timeout_seconds
        self.has_headers = False
        """Whether the first message has the request's headers."""
        self._first: ProcessingRequest | None = None
        """The first message, until ``run`` processes it."""
        self._headers_error: KvRouterError | None = None
        self._refused = False
        self._freed = False
        self._response = EngineResponse(is_stream=False)
        self._has_begun_response = False
        self._stream: PassedStream | None = None
        """Answers most pieces of a stream; None for another response."""
        self._full_duplex_response = False
        self._keeps_body = False
        self._reading: asyncio.Task[Any] | None = None

    async def open(self) -> bool:
        """Reads the first message, once. Returns whether it has headers with a credential that counts.

        Raises:
            KvRouterError: as for ``run``.
        """
        if self._first is None and (message := await self._read()) is not None:
            self._first = message
            self.has_headers = _HEADERS in message
            if self.has_headers:
                self._check_modes(message)
                try:
                    self._request.begin(message)
                except KvRouterError as error:
                    self._headers_error = error
                except BaseException:
                    self._free()
                    raise
        return self.has_headers and self._request.has_caller

    async def run(self) -> None:
        """Processes the request until its stream ends.

        Raises:
            KvRouterError: the gateway or its configuration does not fit the protocol.
        """
        try:
            message, self._first = self._first, None
            if message is not None and self.has_headers:
                await self._answer_headers(message)
                message = await self._read()
            while message is not None:
                kind = message.WhichOneof("request")
                # A gateway may answer by itself, and show only the response.
                if kind == _HEADERS or (kind in _OF_REQUEST and not self.has_headers):
                    raise BadRequest("expected the headers of one request before its body")
                await self._process(kind, message)
                message = await self._read()
        except _GatewayLeft:
            self._metrics.requests.labels(code="CANCELLED").inc()
        finally:
            try:
                if self._has_begun_response and (pick := self._request.pick) is not None:
                    await pick.engine.broke_off()
            finally:
                self._free()
                if self._reading is not None:
                    self._reading.cancel()

    async def _read(self) -> ProcessingRequest | None:
        reading, self._reading = self._reading, None
        message = await (self._context.read() if reading is None else reading)
        return None if message is grpc.aio.EOF else message

    async def _process(self, kind: str | None, message: ProcessingRequest) -> None:
        if self._refused:
            return  # What the gateway sent before it got the refusal.
        self._check_modes(message)
        match kind:
            case "response_body":
                await self._context.write(self._pass_on(message.response_body))
            case "request_body":
                await self._take(message.request_body)
            case "request_trailers":
                if not self._keeps_body:
                    await self._route(end_of_stream=False)
                await self._context.write(responses.REQUEST_TRAILERS)
            case "response_headers":
                await self._begin_response(message)
            case "response_trailers":
                self._end()
                await self._context.write(responses.RESPONSE_TRAILERS)
            case _:
                raise BadRequest("expected headers, a body or trailers, received a message with none of them")

    def _check_modes(self, message: ProcessingRequest) -> None:
        if "protocol_config" not in message:
            return
        modes = message.protocol_config
        # A body that is not sent would be waited for until the gateway's time is over.
        sends_body = not message.request_headers.end_of_stream
        if sends_body and modes.request_body_mode not in _REQUEST_BODY_MODES:
            expected = " or ".join(map(ProcessingMode.BodySendMode.Name, _REQUEST_BODY_MODES))
            received = ProcessingMode.BodySendMode.Name(modes.request_body_mode)
            raise BadRequest(
                f"expected request_body_mode {expected}, received {received}",
                advice="Correct processing_mode of the gateway's ext_proc filter.",
            )
        self._keeps_body = modes.request_body_mode == ProcessingMode.BUFFERED
        self._full_duplex_response = modes.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED
        if self._request.is_authenticated and modes.response_body_mode == ProcessingMode.NONE:
            raise BadRequest(
                "expected response_body_mode FULL_DUPLEX_STREAMED, received NONE: with authentication, the internal "
                "fields of engines are removed from responses",
                advice="Correct processing_mode of the gateway's ext_proc filter.",
            )

    async def _answer_headers(self, message: ProcessingRequest) -> None:
        try:
            if self._headers_error is not None:
                raise self._headers_error
            if message.request_headers.end_of_stream:
                await self._send_to(*self._request.any_endpoints())
            elif self._keeps_body:
                await self._context.write(responses.REQUEST_HEADERS)
        except KvRouterError as error:
            await self._refuse(error)

    async def _take(self, piece: HttpBody) -> None:
        try:
            await self._request.add(piece.body)
        except KvRouterError as error:
            await self._refuse(error)
            return
        if piece.end_of_stream or self._keeps_body:
            await self._route(end_of_stream=True)

    async def _route(self, *, end_of_stream: bool) -> None:
        """Picks an endpoint for the complete request and passes the request on, or refuses it."""
        choosing = asyncio.create_task(self._request.choose())
        try:
            await asyncio.sleep(0)
            if not choosing.done():  # Beside a Scheduler in this process most choices are.
                await self._await_choice(choosing)
        finally:
            if not choosing.done():
                choosing.cancel()
                await asyncio.wait([choosing])
        if choosing.cancelled():
            raise _GatewayLeft
        try:
            pick = choosing.result()
        except KvRouterError as error:
            await self._refuse(error)
            return
        if self._keeps_body:
            body = bytes(self._request.body) if self._request.body_is_changed else None
            added, removed = self._header_changes(pick.headers)
            await self._context.write(responses.route_whole(pick.endpoints, added, removed, body))
            self._request.body = bytearray()
            return
        await self._send_to(pick.endpoints, pick.headers)
        for piece in responses.request_body(self._request.body, end_of_stream=end_of_stream):
            await self._context.write(piece)
        self._request.body = bytearray()

    async def _await_choice(self, choosing: asyncio.Task[Pick]) -> None:
        """Returns when an endpoint is chosen, or the gateway has left."""
        self._reading = asyncio.ensure_future(self._context.read())
        both = {choosing, self._reading}
        patience = _SHORT_SECONDS if self._keeps_body else None
        if not (await asyncio.wait(both, timeout=patience, return_when=asyncio.FIRST_COMPLETED))[0]:
            await self._context.write(responses.more_time(self._timeout_seconds))
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._reading.done() and self._reading.result() is not grpc.aio.EOF:
            await asyncio.wait([choosing])

    async def _send_to(self, endpoints: Sequence[str], headers: Mapping[str, str]) -> None:
        added, removed = self._header_changes(headers)
        await self._context.write(responses.route(endpoints, added, removed))

    def _header_changes(self, headers: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
        """Returns the headers added to the request's, and the names of removed ones."""
        added = {**self._request.added_headers(), **headers}
        return added, sorted(self._request.removed_headers() - added.keys())

    async def _refuse(self, error: KvRouterError) -> None:
        self._refused = True
        self._free()
        self._metrics.requests.labels(code=error.code.name).inc()
        await self._context.write(responses.refusal(error, self._request.id or uuid.uuid4().hex))

    async def _begin_response(self, message: ProcessingRequest) -> None:
        self._stop_passing()  # A gateway may show headers again.
        headers = dict(header_list(message.response_headers.headers))
        is_stream = headers.get("content-type", "").startswith(STREAM_TYPE)
        status = int(headers[":status"]) if headers.get(":status", "").isdigit() else int(HTTPStatus.OK)
        self._has_begun_response = status < HTTPStatus.INTERNAL_SERVER_ERROR
        hides_internal = self._request.is_authenticated
        if hides_internal and headers.get("content-encoding", "identity") != "identity":
            await self._refuse(DependencyAway("the engine compresses a response although nobody accepts that"))
            return
        self._response = EngineResponse(is_stream=is_stream, status=status, hides_internal=hides_internal)
        added: dict[str, str] = {}
        if (pick := self._request.pick) is not None:
            served = served_endpoint(message.metadata_context)
            if served and served != pick.endpoints[0]:
                self._metrics.fallbacks.inc()
                pick = await self._request.follow(pick, served)
            await pick.engine.answered(status, code_details(message))
            added = {"x-kvrouter-worker": rank_text(pick.booking.rank), "x-request-id": self._request.id}
            added["x-kvrouter-overlap-blocks"] = str(pick.overlap_blocks)
            added["x-kvrouter-routed-on"] = text_of(RoutedOn, pick.routed_on)
            if source := pick.headers.get(KV_SOURCE_HEADER):
                added[KV_SOURCE_HEADER] = source
        removed = ("content-length",) if hides_internal else ()
        await self._context.write(responses.response_headers(added, removed))
        if message.response_headers.end_of_stream:
            self._end()
        elif is_stream and self._request.pick is not None:
            hidden = NEVER_QUOTED if hides_internal else ()
            self._stream = PassedStream(sends_back=self._full_duplex_response, hidden=hidden)
            self._context.answer_pieces(self._stream, self._count_passed)

    def _count_passed(self) -> None:
        """Accounts for the pieces that have been answered without being read here."""
        stream, pick = self._stream, self._request.pick
        if stream is None or pick is None:
            return
        tokens, passed = stream.taken()
        self._response.passed(passed)
        if tokens:
            pick.responded(tokens, is_stream=True)
        stream.limit = pick.booking.room - pick.output_tokens

    def _stop_passing(self) -> None:
        self._count_passed()
        self._context.answer_pieces(None)
        self._stream = None

    def _pass_on(self, piece: HttpBody) -> bytes:
        self._count_passed()
        body, ends, response = piece.body, piece.end_of_stream, self._response
        passed = response.take(body, ends=ends)
        if body and self._request.pick is not None:
            tokens = count_tokens(body) if response.is_stream else 1
            self._request.pick.responded(tokens, is_stream=response.is_stream)
        if self._stream is not None:
            self._stream.is_held = response.is_holding
            self._count_passed()
        if ends:
            self._end()
        return responses.response_body(
            passed,
            is_changed=passed is not body and passed != body,
            end_of_stream=ends,
            full_duplex=self._full_duplex_response,
        )

    def _end(self) -> None:
        if self._request.pick is not None:
            self._metrics.requests.labels(code="OK").inc()
            self._free()

    def _free(self) -> None:
        if not self._freed:
            self._freed = True
            self._stop_passing()
            self._request.end(self._response.usage(), is_stream=self._response.is_stream)
