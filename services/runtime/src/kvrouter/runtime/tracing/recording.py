"""Records spans with OpenTelemetry and exports them with OTLP over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlsplit

import structlog
from kvrouter.net import trace_context
from kvrouter.net.span_context import parent_context, traceparent_of
from kvrouter.runtime.tracing.configuration import TracingMetrics
from kvrouter.runtime.tracing.spans import Attribute, Kind, Span, current, install
from kvrouter.runtime.version import VERSION
from kvrouter.v1.errors import KvRouterError
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    SpanKind,
    Status,
    StatusCode,
    Tracer,
)

_EXPORT_SECONDS = 5.0
"""Maximum time of one export, its repetitions included."""
_LAST_EXPORT_SECONDS = 3.0
"""Maximum time to export the last spans when the process stops."""
_QUEUED_SPANS = 8192
"""Spans waiting to be exported; the oldest are dropped."""
_EXPORTED_SPANS = 512
"""Spans exported together."""
_PAUSE_SECONDS = 1.0
"""Maximum pause between two exports."""
_MAX_TEXT = 512
"""Length of a text attribute, characters. Longer ones are cut."""

_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT, Kind.INTERNAL: SpanKind.INTERNAL}

log = structlog.get_logger(component="tracing")


@asynccontextmanager
async def recording(
    endpoint: str, sample_ratio: float, resource: Mapping[str, str], metrics: TracingMetrics
) -> AsyncIterator[None]:
    """Records and exports spans while the context lasts. Failures of the collector never reach requests.

    Args:
        endpoint: URL of the collector. Without a path, it is that of OTLP, /v1/traces.
        sample_ratio: Share of the recorded traces, of those whose client has not decided that, 0 to 1.
        resource: Attributes of this process.
        metrics: Counts the spans.
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create({"service.version": VERSION, **resource}),
        shutdown_on_exit=False,
    )
    exporter = _CountedExporter(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS), _host(url), metrics)
    provider.add_span_processor(
        _CountedProcessor(
            exporter,
            metrics,
            max_queue_size=_QUEUED_SPANS,
            max_export_batch_size=_EXPORTED_SPANS,
            schedule_delay_millis=_PAUSE_SECONDS * 1e3,
        )
    )
    before = install(OpenTelemetryRecorder(provider))
    try:
        yield
    finally:
        install(before)
        await _shut_down(provider)


async def _shut_down(provider: TracerProvider) -> None:
    """Exports the last spans, for a limited time: a collector that is away must not delay the end of the process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def shut_down() -> None:
        provider.shutdown()
        try:
            loop.call_soon_threadsafe(ended.set)
        except RuntimeError:
            return  # It took longer than this process waits.

    threading.Thread(target=shut_down, name="tracing-shutdown", daemon=True).start()
    try:
        async with asyncio.timeout(_LAST_EXPORT_SECONDS):
            await ended.wait()
    except TimeoutError:
        log.warning("tracing.cut_off", after_seconds=_LAST_EXPORT_SECONDS)


class OpenTelemetryRecorder:
    """Records spans with a tracer of OpenTelemetry."""

    def __init__(self, provider: TracerProvider) -> None:
        self.tracer: Tracer = provider.get_tracer("kvrouter", VERSION)
        """For libraries that record spans of their own."""

    @contextmanager
    def span(self, name: str, kind: Kind, traceparent: str) -> Iterator[Span]:
        """Returns a span under the given trace context; one that starts a trace if that is empty."""
        parent = parent_context(traceparent) if traceparent else trace.set_span_in_context(trace.INVALID_SPAN)
        recorded = self.tracer.start_span(name, context=parent, kind=_KINDS[kind])
        wrapped = _RecordedSpan(recorded)
        token = current.set(wrapped)
        try:
            with trace_context.entered(traceparent_of(recorded.get_span_context())):
                yield wrapped
        except KvRouterError as error:
            wrapped.fail(error.code.name, error.message)
            raise
        except asyncio.CancelledError:
            wrapped.fail("CANCELLED", "cancelled")
            raise
        except Exception as error:
            # Its message may contain anything.
            wrapped.fail(type(error).__name__, "")
            raise
        finally:
            current.reset(token)
            recorded.end()


class _RecordedSpan:
    """A span of OpenTelemetry."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def recording(self) -> bool:
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value[:_MAX_TEXT] if isinstance(value, str) else value)

    def add_event(self, name: str, unix_ns: int) -> None:
        self._span.add_event(name, timestamp=unix_ns)

    def fail(self, code: str, message: str) -> None:
        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR, message[:_MAX_TEXT]))


def _host(url: str) -> str:
    """Returns host and port of a URL, which may contain credentials."""
    return urlsplit(url).netloc.rpartition("@")[2]


class _CountedProcessor(BatchSpanProcessor):
    """Counts ended spans."""

    def __init__(self, exporter: SpanExporter, metrics: TracingMetrics, **options: Any) -> None:
        super().__init__(exporter, **options)
        self._ended = metrics.ended

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._ended.inc()
        super().on_end(span)


class _CountedExporter(SpanExporter):
    """Counts the exported spans, and logs when exports begin to fail and to succeed again."""

    def __init__(self, exporter: SpanExporter, collector: str, metrics: TracingMetrics) -> None:
        self._exporter = exporter
        self._collector = collector
        self._exported = metrics.exported
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # a defect of the exporter; its thread must go on
            result = SpanExportResult.FAILURE
        fails = result is not SpanExportResult.SUCCESS
        self._exported.labels("failed" if fails else "exported").inc(len(spans))
        if fails and not self._fails:
            log.warning(
                "tracing.export_failed", collector=self._collector, consequence="spans are lost, requests go on"
            )
        elif self._fails and not fails:
            log.info("tracing.export_recovered", collector=self._collector)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
