"""Distributed tracing of requests with OpenTelemetry, which is an extra and off by default."""

from kvrouter.runtime.tracing.spans import (
    Attribute,
    Kind,
    Span,
    client_call,
    current_span,
    is_recording,
    request_span,
    span,
    tracer,
)

STARTS_TRACES = frozenset(f"kvrouter.v1.FrontendService.{name}" for name in ("Generate", "SelectWorker"))
"""Methods whose calls start a trace if the client has sent no trace context."""

__all__ = [
    "STARTS_TRACES",
    "Attribute",
    "Kind",
    "Span",
    "client_call",
    "current_span",
    "is_recording",
    "request_span",
    "span",
    "tracer",
]
