"""Sends requests of a trace to a Frontend over gRPC. Times come from the engines' clocks."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How requests are made from the trace."""

    model: str
    """Model of the requests."""
    id_prefix: str
    """Prefix of request ids, unique to the run; the request's position follows."""
    mode: str | None = None
    """Routing mode of all requests; None for the Scheduler's own."""
    cache_salt: str = ""
    """Cache salt of all requests; empty for none."""
    request_timeout_seconds: float = 600.0
    """Wall time after which a request is abandoned, above 0."""


def generate_request(request: TraceRequest, options: ReplayOptions) -> FrontendServiceGenerateRequest:
    """Returns the call for a request of the trace, with exactly `output_length` output tokens."""
    message = FrontendServiceGenerateRequest(
        request_id=f"{options.id_prefix}-{request.index}", model=options.model, token_ids=TokenIds(ids=request.tokens())
    )
    message.stop_conditions.max_tokens = request.output_length
    message.stop_conditions.ignore_eos = True
    if options.mode is not None:
        message.overrides.mode = options.mode
    if options.cache_salt:
        message.scope.cache_salt = options.cache_salt
    return message


class FrontendTarget:
    """A Frontend."""

    def __init__(self, frontend: Frontend, options: ReplayOptions) -> None:
        self._frontend = frontend
        self._options = options

    def prepare(self, request: TraceRequest) -> FrontendServiceGenerateRequest:
        """Returns the call for a request."""
        return generate_request(request, self._options)

    async def send(self, prepared: FrontendServiceGenerateRequest, record: RequestRecord) -> None:
        """Sends a request and fills its record. A failure is recorded with its code."""
        deadline = Deadline.after(self._options.request_timeout_seconds)
        try:
            async with aclosing(self._frontend.generate(prepared, deadline=deadline)) as pieces:
                async for piece in pieces:
                    record.take(piece)
        except KvRouterError as error:
            record.fail(error.code.name, error.message)
