"""A recorded request has a span that ends with it, however it ends."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from kvrouter.net import trace_context
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.serving.request_spans import NAME, RequestSpans
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED = f"00-{TRACE}-b7ad6b7169203331-01"
REQUEST = WorkerServiceGenerateRequest(request_id="r", dp_rank=1, token_ids=[1, 2, 3])
FIRST = RequestOutput("r", [7], cached_tokens=2).encode()
LAST = RequestOutput("r", [8], finish_reason=FinishReason.FINISH_REASON_LENGTH).encode()


class Call:
    """Notes what reaches the caller."""

    def __init__(self) -> None:
        self.on_cancelled: Callable[[], None] | None = None
        self.received: list[object] = []

    def respond(self, encoded: bytes) -> None:
        self.received.append(encoded)

    def end(self, encoded: bytes | None = None) -> None:
        self.received.append(("end", encoded))

    def fail(self, error: KvRouterError) -> None:
        self.received.append(error)


class Recorded:
    """Spans of a worker with id 5."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = RequestSpans(provider.get_tracer("test"), 5)

    def ended(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}


def test_prefill_and_decode_are_children_of_the_request_in_the_callers_trace() -> None:
    recorded, call = Recorded(), Call()
    with trace_context.entered(SAMPLED):
        traced = recorded.spans.begin(REQUEST, call)
    assert traced is not None
    with traced.starting():
        engine_context = trace_context.current()
    traced.respond(FIRST)
    assert recorded.ended().keys() == {"prefill"}
    traced.end(LAST)
    assert call.received == [FIRST, ("end", LAST)]
    spans = recorded.ended()
    request = spans[NAME]
    assert spans.keys() == {NAME, "prefill", "decode"}
    assert request.context is not None
    assert engine_context == f"00-{TRACE}-{request.context.span_id:016x}-01"
    assert {span.parent.span_id for name, span in spans.items() if name != NAME and span.parent} == {
        request.context.span_id
    }
    assert dict(request.attributes or {}) == {
        "kvrouter.request_id": "r",
        "kvrouter.attempt": 0,
        "kvrouter.rank": "5/1",
        "gen_ai.usage.input_tokens": 3,
        "kvrouter.cached_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
    }


def test_a_disconnected_caller_ends_the_span_and_reaches_the_engine() -> None:
    recorded, call, aborted = Recorded(), Call(), []
    with trace_context.entered(SAMPLED):
        traced = recorded.spans.begin(REQUEST, call)
    assert traced is not None
    traced.on_cancelled = lambda: aborted.append("r")
    assert call.on_cancelled is not None
    call.on_cancelled()
    assert aborted == ["r"]
    assert (recorded.ended()[NAME].attributes or {})["error.type"] == "CANCELLED"


def test_a_refused_request_ends_its_spans_with_the_code() -> None:
    recorded, call = Recorded(), Call()
    with trace_context.entered(SAMPLED):
        traced = recorded.spans.begin(REQUEST, call)
    assert traced is not None
    with pytest.raises(RequestRefused), traced.starting():
        raise RequestRefused("full", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert call.on_cancelled is None
    assert (recorded.ended()[NAME].attributes or {})["error.type"] == "RESOURCE_EXHAUSTED"


def test_a_request_that_fails_ends_its_spans_and_the_call() -> None:
    recorded, call = Recorded(), Call()
    with trace_context.entered(SAMPLED):
        traced = recorded.spans.begin(REQUEST, call)
    assert traced is not None
    error = RequestRefused("broken", code=grpc.StatusCode.INTERNAL)
    traced.fail(error)
    assert call.received == [error]
    assert recorded.ended().keys() == {NAME, "prefill"}


@pytest.mark.parametrize("context", ["", SAMPLED[:-1] + "0"])
def test_a_request_that_its_caller_does_not_record_is_not_wrapped(context: str) -> None:
    recorded = Recorded()
    with trace_context.entered(context):
        assert recorded.spans.begin(REQUEST, Call()) is None
