"""Starts tracing as the options say."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.tracing.metrics import TracingMetrics
from prometheus_client import CollectorRegistry


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
