"""One HTTP request at a gateway, from its headers to the end of its response: one stream of external processing.

The gateway sends the request's headers and body, and waits. The picker holds them until the body is complete, books a
rank, and returns headers that name its endpoint, then the body. The response passes through piece by piece. The stream
ends early if the client disconnects or the gateway dies; the booking is freed whenever it ends.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import grpc
import structlog
from envoy.config.core.v3.base_pb2 import HeaderMap
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpBody, ProcessingRequest, ProcessingResponse
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.caller import Caller, acting_for
from kvrouter.frontend.access.credentials import HEADERS as CREDENTIAL_HEADERS
from kvrouter.frontend.admission.request_admission import AdmittedRequest, RequestAdmission
from kvrouter.frontend.api.openai.routed_body import RoutedBody
from kvrouter.frontend.api.openai.stream_usage import with_usage
from kvrouter.frontend.api.request_fields import RANK_HEADER, requested_rank
from kvrouter.frontend.endpoint_picker import responses
from kvrouter.frontend.endpoint_picker.engine_response import EngineResponse
from kvrouter.frontend.endpoint_picker.metadata import allowed_endpoints, served_endpoint
from kvrouter.frontend.endpoint_picker.metrics import PickerMetrics
from kvrouter.frontend.endpoint_picker.pick import Pick
from kvrouter.frontend.endpoint_picker.picker import Picker
from kvrouter.frontend.lifecycle.span_attributes import describe_attempt, of_request
from kvrouter.net import trace_context
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, KvRouterError, TooLarge
from kvrouter.runtime.tracing import request_span

log = structlog.get_logger(component="endpoint-picker")

_MAX_BODY_BYTES = 64 << 20
_FOLLOW_SECONDS = 2.0
"""Deadline for booking the load of a request that a fallback served."""
_STREAM_TYPE = "text/event-stream"

_ENCODING = "accept-encoding"

Context = grpc.aio.ServicerContext[ProcessingRequest, ProcessingResponse]


class _GatewayLeft(Exception):
    """The gateway ended the stream: the client disconnected."""


@dataclass(frozen=True, slots=True)
class ExchangeOptions:
    """How requests are treated."""

    timeout_seconds: float
    """Maximum time for a choice."""
    admission: RequestAdmission
    """Admits requests within limits."""
    access: Access | None = None
    """Authentication of the gateway's clients; None for none."""
    requests_usage: bool = False
    """Whether to request the usage of streams for the Frontend's own purpose, and remove it again."""


class Exchange:
    """One request and its response. Call ``run`` once."""

    def __init__(
        self,
        context: Context,
        picker: Picker,
        metrics: PickerMetrics,
        options: ExchangeOptions,
    ) -> None:
        self._context = context
        self._picker = picker
        self._metrics = metrics
        self._options = options
        self._access = options.access
        self._caller: Caller | None = None
        self._refused = False
        self._admitted: AdmittedRequest | None = None
        self._request_id = ""
        self._traceparent = ""
        self._body = bytearray()
        self._allowed: frozenset[str] | None = None
        self._routed = RoutedBody("")
        self._pick: Pick | None = None
        self._dp_rank: int | None = None
        self._removes_usage = False
        self._response = EngineResponse(is_stream=False, removes_usage=False)
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
            self._free()
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
                if not await self._accept(message.request_headers.headers):
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

    async def _accept(self, headers: HeaderMap) -> bool:
        """Returns whether the caller may call the path, and its headers are valid; otherwise refuses the request."""
        named = _headers(headers)
        try:
            if self._access is not None:
                self._caller = self._access.admit_to_engine(named.get(":path", ""), _header_list(headers))
            self._dp_rank = requested_rank(named)
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
        headers = {**self._added_headers, **pick.headers}
        await self._context.write(
            responses.route(pick.endpoints, headers, sorted(self._removed_headers - headers.keys()))
        )
        for piece in responses.request_body(self._body, end_of_stream=end_of_stream):
            await self._context.write(piece)
        self._body = bytearray()

    async def _choose(self) -> Pick:
        with trace_context.entered(self._traceparent), request_span("pick endpoint") as pick_span:
            # The engine continues the trace from here, also if the client has begun none.
            self._traceparent = trace_context.current()
            with acting_for(self._caller) if self._caller is not None else nullcontext():
                pick = await self._choose_endpoint()
            if pick_span.recording:
                pick_span.set(of_request(self._routed.model, self._request_id, self._routed.prompt_tokens))
                describe_attempt(pick_span, pick.booking, pick.endpoints[0])
            return pick

    async def _choose_endpoint(self) -> Pick:
        self._routed, self._body = await self._picker.read(self._body)
        self._routed = routed = replace(self._routed, dp_rank=self._dp_rank)
        self._admitted = self._options.admission.admit(
            self._picker.views(routed.model), routed.prompt_tokens, routed.max_output_tokens, "engine request"
        )
        if self._options.requests_usage and self._full_duplex_response:
            with_requested_usage = with_usage(bytes(self._body))
            self._removes_usage = with_requested_usage is not None
            self._body = bytearray(with_requested_usage or self._body)
        # Stored here, so that it ends with the exchange even if that is cancelled in this moment.
        self._pick = await self._picker.pick(
            routed,
            request_id=self._request_id,
            allowed=self._allowed,
            deadline=Deadline.after(self._options.timeout_seconds),
        )
        return self._pick

    async def _route_without_body(self) -> None:
        """Sends a request without a body, such as GET /v1/models, to any endpoint."""
        try:
            endpoints = self._picker.any_endpoints(self._allowed)
        except KvRouterError as error:
            await self._refuse(error)
        else:
            headers = self._added_headers
            await self._context.write(
                responses.route(endpoints, headers, sorted(self._removed_headers - headers.keys()))
            )

    @property
    def _added_headers(self) -> dict[str, str]:
        """Headers that every engine gets."""
        trace = {trace_context.HEADER: self._traceparent} if self._traceparent else {}
        return {"x-request-id": self._request_id, **trace}

    @property
    def _removed_headers(self) -> set[str]:
        """Headers of the client that no engine gets."""
        removed = set(() if self._access is None else CREDENTIAL_HEADERS)
        if self._dp_rank is not None:
            removed.add(RANK_HEADER)
        if self._removes_usage:
            removed.add(_ENCODING)  # A compressed stream could not be read.
        return removed

    async def _refuse(self, error: KvRouterError, *, status: int | None = None) -> None:
        self._refused = True
        self._metrics.requests.labels(code=error.code.name).inc()
        await self._context.write(responses.refusal(error, status=status))

    async def _begin_response(self, message: ProcessingRequest) -> None:
        headers = _headers(message.response_headers.headers)
        self._response = EngineResponse(
            is_stream=headers.get("content-type", "").startswith(_STREAM_TYPE), removes_usage=self._removes_usage
        )
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
            added["x-kvrouter-overlap-blocks"] = str(self._pick.overlap_blocks)
            if self._pick.routed_on_load:
                added["x-kvrouter-routed-on"] = "load"
        await self._context.write(responses.response_headers(added))
        if message.response_headers.end_of_stream:
            self._end()

    async def _pass_on(self, piece: HttpBody) -> None:
        passed = self._response.take(piece.body, ends=piece.end_of_stream)
        if self._pick is not None:
            self._pick.responded(piece.body, is_stream=self._response.is_stream)
        if piece.end_of_stream:
            self._end()
        await self._context.write(
            responses.response_body(passed, end_of_stream=piece.end_of_stream, full_duplex=self._full_duplex_response)
        )

    def _end(self) -> None:
        if self._pick is not None:
            self._metrics.requests.labels(code="OK").inc()
            self._free()

    def _free(self) -> None:
        """Frees the booking, and ends the request for its limits, once."""
        usage = self._response.usage()
        pick, self._pick = self._pick, None
        admitted, self._admitted = self._admitted, None
        output_tokens = None if usage is None else usage.completion_tokens
        if pick is not None:
            pick.end(None if usage is None else usage.cached_tokens)
            if output_tokens is None and (self._response.is_stream or not pick.output_tokens):
                output_tokens = pick.output_tokens
        if admitted is not None:
            admitted.end(output_tokens if pick is not None else 0)


def _headers(headers: HeaderMap) -> dict[str, str]:
    return dict(_header_list(headers))


def _header_list(headers: HeaderMap) -> list[tuple[str, str]]:
    """Returns names in lower case and values, with repeated headers."""
    return [
        (header.key.lower(), header.value or header.raw_value.decode("utf-8", "replace")) for header in headers.headers
    ]
