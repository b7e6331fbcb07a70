"""Assembles a Frontend from its parts and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog
from kvrouter.frontend.api.http_server import HttpApi
from kvrouter.frontend.api.service import FrontendService, GatewayOptions
from kvrouter.frontend.api.validation import Limits
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.recording.file import RecordingFile
from kvrouter.frontend.recording.recorder import Recorder
from kvrouter.frontend.scheduler_client.link_pool import SchedulerLinks
from kvrouter.frontend.scheduler_client.source import SchedulerSource
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.worker_client.circuit_breaker import BackOff
from kvrouter.frontend.worker_client.client import WorkerClient
from kvrouter.frontend.worker_client.health import WorkerHealth
from kvrouter.frontend.worker_client.pool import WorkerPool
from kvrouter.frontend.worker_client.probes import WorkerProbes
from kvrouter.runtime import http_server
from kvrouter.runtime.http_server import HttpLimits, share_of_descriptors
from kvrouter.runtime.process.context import Runtime
from kvrouter.v1.message_limits import DEFAULT_LIMITS, MessageLimits

log = structlog.get_logger(component="frontend")


@asynccontextmanager
async def running(
    settings: FrontendSettings, runtime: Runtime, schedulers: SchedulerSource
) -> AsyncIterator[FrontendService]:
    """Runs a Frontend with its Scheduler sessions and worker probes while the context lasts; yields the service."""
    metrics = FrontendMetrics(runtime.registry)
    links = SchedulerLinks(
        runtime.directory,
        schedulers,
        instance_id=runtime.instance_id,
        sharding=settings.sharding,
        heartbeat_timeout_seconds=settings.scheduler_heartbeat_timeout_seconds,
    )
    pool = WorkerPool(runtime.instance_id, counts=runtime.call_streams.client("worker"))
    back_off = BackOff(
        settings.worker_back_off_failures, settings.worker_back_off_seconds, settings.worker_back_off_max_seconds
    )
    health = WorkerHealth(back_off, max_missed=settings.worker_probe_failures)
    probes = WorkerProbes(runtime.directory, pool, health, interval_seconds=settings.worker_probe_seconds)
    metrics.suspected_workers.set_function(lambda: health.suspected)
    metrics.backed_off_workers.set_function(lambda: health.backed_off)
    metrics.worker_channels.set_function(lambda: len(pool))
    limits = Limits(settings.max_prompt_tokens, settings.max_output_tokens)
    options = GatewayOptions(limits, settings.max_attempts, settings.request_timeout_seconds)
    recorder: Recorder | None = None
    if settings.record:
        recorder = Recorder(RecordingFile(Path(settings.record), settings.record_max_bytes), runtime.registry)
    service = FrontendService(runtime.directory, links, WorkerClient(pool, health, metrics), metrics, options, recorder)
    async with asyncio.TaskGroup() as group:
        linking = group.create_task(links.run(), name="scheduler-links")
        probing = group.create_task(probes.run(), name="worker-probes")
        if recorder is not None:
            group.create_task(recorder.run(), name="recording")
        try:
            yield service
        finally:
            linking.cancel()
            probing.cancel()
            if recorder is not None:
                recorder.stop()
            await pool.close()


def request_limits(settings: FrontendSettings) -> MessageLimits:
    """Returns the size limits of a gRPC request to a Frontend.

    They are half of what Scheduler and worker accept, because the requests that the Frontend sends them are larger.
    """
    return MessageLimits(settings.max_prompt_tokens, DEFAULT_LIMITS.besides_bytes // 2, DEFAULT_LIMITS.records // 2)


@asynccontextmanager
async def serving_http(service: FrontendService, settings: FrontendSettings, runtime: Runtime) -> AsyncIterator[str]:
    """Serves the HTTP API while the context lasts; yields its address, host:port.

    A client that disconnects cancels its request. When the context ends, running requests may finish.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    application = HttpApi(service, runtime.registry, body_seconds=settings.http_body_seconds).application()
    limits = HttpLimits(settings.http_max_connections or share_of_descriptors(1 / 2), settings.http_header_seconds)
    async with http_server.serving_http(
        application,
        settings.host,
        settings.port,
        limits,
        runtime.registry,
        name="frontend",
        handler_cancellation=True,
        auto_decompress=False,
        shutdown_timeout=settings.drain_seconds,
    ) as (host, port):
        log.info("http.listening", address=f"{host}:{port}")
        yield f"{host}:{port}"
