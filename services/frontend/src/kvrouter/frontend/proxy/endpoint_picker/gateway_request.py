"""A request of the gateway: its headers and body, the endpoint chosen for it, and its accounts until it ends."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from kvrouter.frontend.access.body_room import BodyRoom, BodyTooLarge
from kvrouter.frontend.access.caller import Caller, acting_for
from kvrouter.frontend.access.quotas import Grant
from kvrouter.frontend.access.request_admission import AdmittedRequest
from kvrouter.frontend.edge.frame import KV_SOURCE_HEADER
from kvrouter.frontend.edge.http_body import ENCODINGS, inflated
from kvrouter.frontend.edge.request_fields import RANK_HEADER, requested_id, requested_rank
from kvrouter.frontend.proxy.endpoint_picker.engines import Pick
from kvrouter.frontend.proxy.endpoint_picker.picker import Picker
from kvrouter.frontend.proxy.endpoint_picker.responses import allowed_endpoints, header_list
from kvrouter.frontend.proxy.engine_request import engine_request_id, may_reach_engine
from kvrouter.frontend.proxy.engine_response import Usage
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.request.gen_ai import operation_of, span_attributes
from kvrouter.frontend.request.progress import describe_attempt
from kvrouter.frontend.workers.poison_prompts import RequestDeaths
from kvrouter.net import trace_context
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.tracing import request_span

_MAX_BODY_BYTES = 64 << 20
_FOLLOW_SECONDS = 2.0
"""Deadline for booking the load of a request a fallback served."""
_ENCODING = "accept-encoding"


class GatewayRequest:
    """One request. ``end`` must follow."""

    def __init__(self, picker: Picker) -> None:
        self.id = ""
        """Id of the request, for logs and the engine; empty if the client's is invalid."""
        self.body = bytearray()
        """The body; after the choice the one for the engine."""
        self.body_is_changed = False
        """Whether the engine's body differs from the client's."""
        self.pick: Pick | None = None
        """The chosen endpoint and its booking; None before the choice and after the end."""
        self._picker = picker
        self._access = picker.access
        self._admission = picker.admission
        self._settings = picker.settings
        self._caller: Caller | None = None
        self._grant: Grant | None = None
        self._room: BodyRoom | None = None
        self._admitted: AdmittedRequest | None = None
        self._traceparent = ""
        self._deaths: RequestDeaths | None = None
        self._has_foreign_state = False
        self._allowed: frozenset[str] | None = None
        self._routed = RoutedBody("")
        self._dp_rank: int | None = None
        self._headers: Mapping[str, str] = {}
        self._path = ""
        self._hidden: set[str] = set()
        self._content_type = ""
        self._content_encoding = ""
        self._is_inflated = False

    @property
    def is_authenticated(self) -> bool:
        """Whether the client has a key, so it sets and sees no internal fields of engines."""
        return self._access is not None

    @property
    def has_caller(self) -> bool:
        """Whether its headers have a credential that counts, or none is needed."""
        return self._access is None or self._caller is not None

    def begin(self, message: ProcessingRequest) -> None:
        """Reads the request's headers.

        Raises:
            Unauthenticated, PermissionDenied: the caller may not call the path.
            RateLimited: a limit of its key or tenant is reached.
            BadRequest: a header is invalid.
        """
        listed = header_list(message.request_headers.headers)
        headers = dict(listed)
        self._path = headers.get(":path", "").partition("?")[0]
        self._content_type = headers.get("content-type", "").lower()
        self._content_encoding = headers.get("content-encoding", "identity").strip().lower()
        self.id = requested_id(headers) or uuid.uuid4().hex
        self._traceparent = trace_context.checked(headers.get(trace_context.HEADER, ""))
        self._has_foreign_state = not self._traceparent and trace_context.STATE_HEADER in headers
        if self._access is not None:
            self._caller, self._grant = self._access.admit_to_engine(self._path, listed)
            self._hidden = {name for name in headers if not may_reach_engine(name)}
            self.id = engine_request_id(self.id) or uuid.uuid4().hex
        with self._acting():
            self._room = self._admission.room()
        self._dp_rank = requested_rank(headers)
        self._headers = headers
        self._allowed = allowed_endpoints(message.metadata_context)

    async def add(self, piece: bytes) -> None:
        """Adds a piece of the body, when there is room for it.

        Raises:
            BodyTooLarge: the body is too long.
            Overloaded: there is no room for it.
        """
        size = len(self.body) + len(piece)
        if size > _MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body is longer than {_MAX_BODY_BYTES} bytes")
        if self._room is not None:
            await self._room.hold(size)
        self.body += piece

    async def choose(self) -> Pick:
        """Chooses and books an endpoint for the complete request.

        Raises:
            KvRouterError: the request is refused.
        """
        with trace_context.entered(self._traceparent), request_span("pick endpoint") as pick_span:
            # The engine continues the trace from here, also if the client has begun none.
            self._traceparent = trace_context.current()
            with self._acting(), self._room or nullcontext():
                pick = await self._choose()
            if pick_span.recording:
                routed, operation = self._routed, operation_of(self._path)
                attributes = span_attributes(routed.model, operation, routed.max_output_tokens, routed.prompt_tokens)
                pick_span.set(attributes | {"kvrouter.request_id": self.id})
                describe_attempt(pick_span, pick.booking, pick.endpoints[0])
            return pick

    def _acting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._caller is None else acting_for(self._caller, self._grant)

    async def _choose(self) -> Pick:
        received = self.body
        is_json = await self._inflate() and self._is_json()
        if self._room is not None:
            self._room.is_read(len(self.body))
        routed, self.body = await self._picker.read(self.body, self._path, is_json=is_json, headers=self._headers)
        self._routed = routed
        servers = self._picker.resolve(routed)
        tenant = "" if self._caller is None else self._caller.tenant
        self._deaths = deaths = self._picker.deaths(routed, servers.model, tenant)
        self._admitted = self._admission.admit(
            servers.views,
            routed.prompt_tokens,
            routed.max_output_tokens,
            "engine request",
            sequences=routed.sequences,
        )
        self.body_is_changed = self.body is not received
        # Stored here, so that it ends with the request even if that is cancelled in this moment.
        self.pick = await self._picker.pick(
            routed,
            servers,
            deaths,
            request_id=self.id,
            allowed=self._allowed,
            deadline=Deadline.after(self._settings.request_timeout_seconds),
        )
        return self.pick

    async def _inflate(self) -> bool:
        """Decompresses the body, since few engines do. Returns False for an encoding that only the engine may know."""
        encoding = self._content_encoding
        if encoding == "identity":
            return True
        if encoding not in ENCODINGS and not self.is_authenticated:
            return False
        if self._room is not None:
            self.body = await inflated(self.body, encoding, self._room, limit=_MAX_BODY_BYTES)
            self._is_inflated = True
        return True

    def _is_json(self) -> bool:
        """Returns whether the body shall be JSON: always for a client with a key, whose fields are checked."""
        kind = self._content_type
        return self.is_authenticated or not kind or "json" in kind or self.body[:64].lstrip().startswith(b"{")

    def any_endpoints(self) -> tuple[list[str], dict[str, str]]:
        """Returns endpoints for a request without a body, such as GET /v1/models, and headers; books nothing.

        Raises:
            NoWorkers: there are none among those allowed.
        """
        return self._picker.any_endpoints(self._allowed)

    async def follow(self, pick: Pick, served: str) -> Pick:
        """Books the request at the endpoint that served it instead of the chosen one, and returns that booking."""
        deadline = Deadline.after(_FOLLOW_SECONDS)
        assert self._deaths is not None, "it was chosen for before"  # noqa: S101
        self.pick = await self._picker.follow(
            pick, served, self._routed, self._deaths, request_id=self.id, deadline=deadline
        )
        return self.pick

    def added_headers(self) -> dict[str, str]:
        """Returns headers every engine gets."""
        trace = {trace_context.HEADER: self._traceparent} if self._traceparent else {}
        return {"x-request-id": self.id, **trace}

    def removed_headers(self) -> set[str]:
        """Returns headers of the client no engine gets."""
        removed = self._hidden | {KV_SOURCE_HEADER} & self._headers.keys()
        if self._dp_rank is not None:
            removed.add(RANK_HEADER)
        if self._has_foreign_state:
            removed.add(trace_context.STATE_HEADER)  # It belongs to no trace context, least of all to a new one.
        if self._is_inflated:
            removed.add("content-encoding")
        if self.is_authenticated:
            removed.add(_ENCODING)  # A compressed stream could not be read.
        return removed

    def end(self, usage: Usage | None, *, is_stream: bool) -> None:
        """Frees the booking, and ends the request for its limits, once.

        Args:
            usage: The engine's report; None for none.
            is_stream: Whether the response was a stream.
        """
        pick, self.pick = self.pick, None
        admitted, self._admitted = self._admitted, None
        output_tokens = None if usage is None else usage.completion_tokens
        if usage is not None:
            self._routed.counted(usage.prompt_tokens)
        if pick is not None:
            pick.end(None if usage is None else usage.cached_tokens, output_tokens)
            if output_tokens is None and (is_stream or not pick.output_tokens):
                output_tokens = pick.output_tokens
        if admitted is not None:
            admitted.end(
                output_tokens if pick is not None else 0,
                sent=pick is not None,
                prompt_tokens=usage.prompt_tokens if usage is not None and self._routed.is_estimated else None,
            )
        if self._grant is not None:
            self._grant.end()
        if self._room is not None:
            self._room.end()
