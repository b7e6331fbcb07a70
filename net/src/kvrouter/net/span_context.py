"""Translates trace context to and from OpenTelemetry, whose API only tracing processes need."""

from __future__ import annotations

from kvrouter.net import trace_context
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context


def parent_context(traceparent: str) -> Context:
    """Returns the context of OpenTelemetry for children of the span a valid ``traceparent`` names."""
    trace_id, span_id, flags = traceparent[3:35], traceparent[36:52], traceparent[53:55]
    tracestate = trace_context.companions().tracestate
    parent = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([tracestate]) if tracestate else None,
    )
    return set_span_in_context(NonRecordingSpan(parent))


def traceparent_of(context: SpanContext) -> str:
    """Returns the ``traceparent`` of a span."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & TraceFlags.SAMPLED:02x}"
