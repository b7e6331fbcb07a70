"""One HTTP request at a gateway, from its headers to the end of its response: one stream of external processing.

The gateway sends the request's headers and body, and waits. The picker holds them until the body is complete, books a
rank, and returns headers that name its endpoint, then the body. The response passes through piece by piece. The stream
ends early if the client disconnects or the gateway dies; the booking is freed whenever it ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection
from typing import Any

import grpc
import structlog
from envoy.config.core.v3.base_pb2 import HeaderMap
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest, ProcessingResponse
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller
from kvrouter.frontend.access.credentials import HEADERS as CREDENTIAL_HEADERS
from kvrouter.frontend.access.quotas import Grant
from kvrouter.frontend.api.openai.routed_body import RoutedBody
from kvrouter.frontend.endpoint_picker import responses
from kvrouter.frontend.endpoint_picker.metadata import allowed_endpoints, served_endpoint
from kvrouter.frontend.endpoint_picker.metrics import PickerMetrics
from kvrouter.frontend.endpoint_picker.pick import Pick
from kvrouter.frontend.endpoint_picker.picker import Picker
from kvrouter.net import trace_context
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, KvRouterError, TooLarge
from kvrouter.runtime.tracing import request_span

log = structlog.get_logger(component="endpoint-picker")

_MAX_BODY_BYTES = 64 << 20
_FOLLOW_SECONDS = 2.0
"""Deadline for booking the load of a request that a fallback served."""
_STREAM_TYPE = "text/event-stream"

Context = grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]


class _GatewayLeft(Exception):
    """The gateway ended the stream: the client disconnected."""


class Exchange:
    """One request and its response. Call ``run`` once."""

    def __init__(
        self,
        context: Context,
        picker: Picker,
        metrics: PickerMetrics,
        *,
        timeout_seconds: float,
        access: Access | None = None,
    ) -> None:
        self._context = context
        self._picker = picker
        self._metrics = metrics
        self._timeout_seconds = timeout_seconds
        self._access = access
        self._caller: Caller | None = None
        self._refused = False
        self._grant: Grant | None = None
        self._request_id = ""
        self._traceparent = ""
        self._body = bytearray()
        self._allowed: frozenset[str] | None = None
        self._routed = RoutedBody("")
        self._pick: Pick | None = None
        self._is_stream = False
        self._full_duplex_response = False
        self._reading: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Processes the request until its stream ends.

        Raises:
            KvRouterError: the gateway's configuration does not fit the protocol.
        """
        try:
            while (message := await self._read()) is not None:
                await self._process(message)
        except _GatewayLeft:
            self._metrics.requests.labels(code="CANCELLED").inc()
        finally:
            if self._pick is not None:
                self._pick.end()
            if self._grant is not None:
                self._grant.end()
            if self._reading is not None:
                self._reading.cancel()

    async def _read(self) -> ProcessingRequest | None:
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._context.read())
        message = await self._reading
        self._reading = None
        return None if message is grpc.aio.EOF else message

    async def _process(self, message: ProcessingRequest) -> None:
        if self._refused:
            return  # What the gateway sent before it got the refusal.
        if message.HasField("protocol_config"):
            self._check_modes(message)
        match message.WhichOneof("request"):
            case "request_headers":
                headers = _headers(message.request_headers.headers)
                self._request_id = headers.get("x-request-id") or uuid.uuid4().hex
                self._traceparent = trace_context.checked(headers.get(trace_context.HEADER, ""))
                if self._access is not None and not await self._authenticate(message.request_headers.headers):
                    return
                self._allowed = allowed_endpoints(message.metadata_context)
                if message.request_headers.end_of_stream:
                    await self._route_without_body()
            case "request_body":
                await self._take(message.request_body)
            case "request_trailers":
                await self._route(end_of_stream=False)
                await self._context.write(responses.request_trailers())
            case "response_headers":
                await self._begin_response(message)
            case "response_body":
                await self._pass_on(message.response_body)
            case "response_trailers":
                self._end()
                await self._context.write(responses.response_trailers())
            case _:
                raise BadRequest("expected headers, a body or trailers, received a message with none of them")

    async def _authenticate(self, headers: HeaderMap) -> bool:
        """Returns whether the caller may call the path; otherwise the request is refused."""
        assert self._access is not None  # noqa: S101 - checked by the caller
        path = _headers(headers).get(":path", "")
        try:
            self._caller = self._access.admit_to_engine(path, _header_list(headers))
        except KvRouterError as error:
            await self._refuse(error)
            return False
        return True

    def _check_modes(self, message: ProcessingRequest) -> None:
        modes = message.protocol_config
        if modes.request_body_mode not in (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.NONE):
            received = ProcessingMode.BodySendMode.Name(modes.request_body_mode)
            raise BadRequest(
                f"expected request_body_mode FULL_DUPLEX_STREAMED, received {received}",
                advice="Correct processing_mode of the gateway's ext_proc filter.",
            )
        self._full_duplex_response = modes.response_body_mode == ProcessingMode.FULL_DUPLEX_STREAMED

    async def _take(self, piece: HttpBody) -> None:
        self._body += piece.body
        if len(self._body) > _MAX_BODY_BYTES:
            await self._refuse(TooLarge(f"the body is longer than {_MAX_BODY_BYTES} bytes"), status=413)
        elif piece.end_of_stream:
            await self._route(end_of_stream=True)

    async def _route(self, *, end_of_stream: bool) -> None:
        """Picks an endpoint for the complete request and passes the request on, or refuses it."""
        choosing = asyncio.create_task(self._choose())
        self._reading = asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait({choosing, self._reading}, return_when=asyncio.FIRST_COMPLETED)
            if self._reading.done() and self._reading.result() is not grpc.aio.EOF:
                await asyncio.wait([choosing])
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
        headers = {"x-request-id": self._request_id, **pick.headers}
        await self._context.write(responses.route(pick.endpoints, headers, self._hidden_headers))
        for piece in responses.request_body(self._body, end_of_stream=end_of_stream):
            await self._context.write(piece)
        self._body = bytearray()

    async def _choose(self) -> Pick:
        with trace_context.entered(self._traceparent), request_span("pick endpoint") as pick_span:
            pick = await self._choose_endpoint()
            if pick_span.recording:
                pick_span.set({"kvrouter.request_id": self._request_id, "gen_ai.request.model": self._routed.model})
            return pick

    async def _choose_endpoint(self) -> Pick:
        self._routed, self._body = await self._picker.read(self._body, self._caller)
        if self._access is not None:
            tokens = self._routed.prompt_tokens + self._routed.max_output_tokens
            self._grant = self._access.grant(tokens, "engine request", self._caller)
        # Stored here, so that it ends with the exchange even if that is cancelled in this moment.
        self._pick = await self._picker.pick(
            self._routed,
            request_id=self._request_id,
            allowed=self._allowed,
            deadline=Deadline.after(self._timeout_seconds),
        )
        return self._pick

    async def _route_without_body(self) -> None:
        """Sends a request without a body, such as GET /v1/models, to any endpoint."""
        try:
            endpoints = self._picker.any_endpoints(self._allowed)
        except KvRouterError as error:
            await self._refuse(error)
        else:
            headers = {"x-request-id": self._request_id}
            await self._context.write(responses.route(endpoints, headers, self._hidden_headers))

    @property
    def _hidden_headers(self) -> Collection[str]:
        return () if self._access is None else CREDENTIAL_HEADERS

    async def _refuse(self, error: KvRouterError, *, status: int | None = None) -> None:
        self._refused = True
        self._metrics.requests.labels(code=error.code.name).inc()
        await self._context.write(responses.refusal(error, status=status))

    async def _begin_response(self, message: ProcessingRequest) -> None:
        headers = _headers(message.response_headers.headers)
        self._is_stream = headers.get("content-type", "").startswith(_STREAM_TYPE)
        added: dict[str, str] = {}
        if self._pick is not None:
            served = served_endpoint(message.metadata_context)
            if served and served != self._pick.endpoints[0]:
                self._metrics.fallbacks.inc()
                self._pick = await self._picker.follow(
                    self._pick,
                    served,
                    self._routed,
                    request_id=self._request_id,
                    deadline=Deadline.after(_FOLLOW_SECONDS),
                )
            rank = self._pick.booking.rank
            added = {"x-kvrouter-worker": f"{rank.worker_id}:{rank.dp_rank}", "x-request-id": self._request_id}
            if self._pick.routed_on_load:
                added["x-kvrouter-routed-on"] = "load"
        await self._context.write(responses.response_headers(added))
        if message.response_headers.end_of_stream:
            self._end()

    async def _pass_on(self, piece: HttpBody) -> None:
        if self._pick is not None:
            self._pick.responded(piece.body, is_stream=self._is_stream)
        if piece.end_of_stream:
            self._end()
        await self._context.write(
            responses.response_body(
                piece.body, end_of_stream=piece.end_of_stream, full_duplex=self._full_duplex_response
            )
        )

    def _end(self) -> None:
        if self._pick is not None:
            self._pick.end()
            self._metrics.requests.labels(code="OK").inc()
            self._pick = None


def _headers(headers: HeaderMap) -> dict[str, str]:
    return dict(_header_list(headers))


def _header_list(headers: HeaderMap) -> list[tuple[str, str]]:
    """Returns names in lower case and values, with repeated headers."""
    return [
        (header.key.lower(), header.value or header.raw_value.decode("utf-8", "replace")) for header in headers.headers
    ]
