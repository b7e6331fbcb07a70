"""Starts tracing as the options say."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.runtime.config.settings import ServiceSettings
from prometheus_client import CollectorRegistry, Counter


class TracingNotInstalled(Exception):
    """Tracing is configured, but its extra is not installed."""


@asynccontextmanager
async def tracing(settings: ServiceSettings, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Traces requests while the context lasts, if a collector is configured.

    Raises:
        TracingNotInstalled: OpenTelemetry is not installed, or another package replaced a part of it.
    """
    metrics = TracingMetrics(registry)
    if not settings.otlp_endpoint:
        yield
        return
    # Imported only here, since OpenTelemetry is an extra.
    try:
        from kvrouter.runtime.tracing.recording import recording
    except ModuleNotFoundError as error:
        raise TracingNotInstalled(f"--otlp-endpoint needs {error.name}: install kvrouter[tracing]") from None
    except ImportError as error:
        # xds-protos, for the endpoint picker, has an older copy of a file of opentelemetry-proto.
        advice = "if kvrouter[envoy] is installed too, run pip install --force-reinstall --no-deps opentelemetry-proto"
        raise TracingNotInstalled(f"--otlp-endpoint: OpenTelemetry is damaged ({error}); {advice}") from None
    # It logs each failed attempt of each export; the log says it once, and metrics count the spans.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    resource = {
        "service.name": f"kvrouter-{settings.table()}",
        "service.namespace": settings.namespace,
        "service.instance.id": settings.instance_id,
    }
    async with recording(settings.otlp_endpoint, settings.trace_sample_ratio, resource, metrics):
        yield


class TracingMetrics:
    """Counts spans, so it shows if a collector is away or too slow."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ended = Counter("kvrouter_trace_spans", "Spans that were sampled and have ended.", registry=registry)
        self.exported = Counter(
            "kvrouter_trace_spans_exported",
            "Spans by outcome of their export: exported or failed. Those that are neither are queued or were dropped.",
            ["outcome"],
            registry=registry,
        )
