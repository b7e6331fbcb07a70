"""Spans of the requests of a worker, with OpenTelemetry: the request, its prefill and its decode.

Imports OpenTelemetry, which the SDK does not require: only a worker with a tracer imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrouter.net import trace_context
from kvrouter.net.span_context import parent_context, traceparent_of
from kvrouter.publisher.serving.requests import OutputCall
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.texts import text_of
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context

NAME = "kvrouter.v1.WorkerService/Generate"


class RequestSpans:
    """Records the requests of a worker whose caller records them."""

    def __init__(self, tracer: Tracer, worker_id: int) -> None:
        """Records with ``tracer``; its sampler decides, which by default follows the caller's sampled flag."""
        self._tracer = tracer
        self._worker_id = worker_id

    def begin(self, request: WorkerServiceGenerateRequest, call: OutputCall) -> TracedCall | None:
        """Begins the span of a request under the current trace context; returns None if it is not recorded."""
        traceparent = trace_context.current()
        if not traceparent:
            return None
        span = self._tracer.start_span(NAME, context=parent_context(traceparent), kind=SpanKind.SERVER)
        if not span.is_recording():
            return None
        span.set_attributes(
            {
                "kvrouter.request_id": request.request_id,
                "kvrouter.attempt": request.attempt,
                "kvrouter.rank": f"{self._worker_id}/{request.dp_rank}",
                "gen_ai.usage.input_tokens": len(request.token_ids),
            }
        )
        return TracedCall(self._tracer, span, call)


class TracedCall:
    """A Generate call whose span has a child until the first output and one from there to the end."""

    __slots__ = ("_call", "_context", "_has_output", "_phase", "_span", "_tracer", "on_cancelled")

    def __init__(self, tracer: Tracer, span: Span, call: OutputCall) -> None:
        """Owns ``span`` and ends it with the call."""
        self.on_cancelled: Callable[[], None] | None = None
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span)
        self._phase = tracer.start_span("prefill", context=self._context)
        self._has_output = False
        self._call = call
        call.on_cancelled = self._cancelled

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Sets the trace context for the engine while it takes the request. If it does not, the spans end."""
        try:
            with trace_context.entered(traceparent_of(self._span.get_span_context())):
                yield
        except BaseException as error:
            self._call.on_cancelled = None
            self._fail(error.code.name if isinstance(error, KvRouterError) else type(error).__name__)
            raise

    def respond(self, encoded: bytes) -> None:
        """Sends a response."""
        if not self._has_output:
            self._first_output(encoded)
        self._call.respond(encoded)

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""
        if encoded is not None:
            if not self._has_output:
                self._first_output(encoded)
            reason = WorkerServiceGenerateResponse.FromString(encoded).output.finish_reason
            self._span.set_attribute("gen_ai.response.finish_reasons", [text_of(FinishReason, reason)])
        self._end()
        self._call.end(encoded)

    def fail(self, error: KvRouterError) -> None:
        """Ends the call with an error."""
        self._fail(error.code.name)
        self._call.fail(error)

    def _cancelled(self) -> None:
        self._fail("CANCELLED")
        if self.on_cancelled is not None:
            self.on_cancelled()

    def _first_output(self, encoded: bytes) -> None:
        self._has_output = True
        output = WorkerServiceGenerateResponse.FromString(encoded).output
        if "cached_tokens" in output:
            self._span.set_attribute("kvrouter.cached_tokens", output.cached_tokens)
        self._phase.end()
        self._phase = self._tracer.start_span("decode", context=self._context)

    def _fail(self, error_type: str) -> None:
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR))
        self._end()

    def _end(self) -> None:
        self._phase.end()
        self._span.end()
