"""Hosts the services of one process: registration, gRPC server, readiness, and draining."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from google.protobuf.descriptor import ServiceDescriptor
from kvrouter.runtime.process.context import Runtime
from kvrouter.runtime.rpc import Guard, RpcServer
from kvrouter.runtime.telemetry.grpc_servers import expose_servers
from kvrouter.runtime.telemetry.health import readiness_gauge
from kvrouter.runtime.telemetry.metrics import serving_ops
from kvrouter.v1.message_limits import DEFAULT_LIMITS, MessageLimits
from kvrouter.v1.registry_pb2 import ServiceRegistration

log = structlog.get_logger(component="hosting")

_READINESS_SECONDS = 0.05
"""Interval of readiness checks."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A service to host."""

    kind: str
    """indexer, scheduler or frontend."""
    descriptor: ServiceDescriptor
    implementation: object
    ready: Callable[[], bool]
    """Whether the service can work; called often, so it must be cheap."""
    http_endpoint: str = ""
    """Address of the service's own HTTP API, host:port; empty for that of the ops server."""
    limits: MessageLimits = DEFAULT_LIMITS
    """Size limits of a request."""
    guard: Guard | None = None
    """Decides which calls may run; None for all."""


async def host(
    runtime: Runtime,
    services: Sequence[Hosted],
    stopping: asyncio.Event,
    *,
    started: Callable[[RpcServer], None] | None = None,
    reuse_port: bool = False,
) -> None:
    """Serves until ``stopping`` is set, then withdraws the registrations and drains.

    Args:
        runtime: Shared resources; its settings have the addresses to listen on.
        services: The services, on one gRPC server.
        stopping: Event that stops the services.
        started: Called with the server once it listens.
        reuse_port: Whether processes share the gRPC port, which their parent holds (``shared_port``).

    Raises:
        BindFailed: an address cannot be listened on.
    """
    settings = runtime.settings
    counts = runtime.call_streams.server()
    server = RpcServer(
        settings.bind, call_stream_counts=counts, reuse_port=reuse_port, tls=runtime.tls, callers=runtime.callers
    )
    expose_servers(runtime.registry, lambda: [server])
    readiness = readiness_gauge(runtime.registry)
    for service in services:
        readiness.labels(service.kind).set_function(partial(server.health.is_ready, service.descriptor.full_name))
        server.add_service(service.descriptor, service.implementation, limits=service.limits, guard=service.guard)
    async with serving_ops(
        settings.http_bind,
        runtime.registry,
        server.health,
        header_seconds=settings.http_header_seconds,
        tls=runtime.tls,
    ) as ops_address:
        await server.start()
        try:
            for service in services:
                registration = ServiceRegistration(
                    endpoint=server.endpoint(settings.advertise),
                    http_endpoint=service.http_endpoint or ops_address,
                    registered_unix_ns=time.time_ns(),
                )
                runtime.registrar.register(service.kind, registration)
            if started is not None:
                started(server)
            async with asyncio.TaskGroup() as group:
                following = group.create_task(_follow_readiness(runtime, server, services))
                await stopping.wait()
                following.cancel()
            log.info("service.draining", calls=server.calls, at_most_seconds=settings.drain_seconds)
        finally:
            runtime.registrar.withdraw()
            await server.drain(settings.drain_seconds)


async def _follow_readiness(runtime: Runtime, server: RpcServer, services: Sequence[Hosted]) -> None:
    known = dict.fromkeys((service.kind for service in services), False)
    while True:
        for service in services:
            ready = service.ready()
            if ready != known[service.kind]:
                known[service.kind] = ready
                log.info("service.ready" if ready else "service.not_ready", service=service.kind)
                server.health.set_ready(service.descriptor.full_name, ready)
                runtime.registrar.set_ready(service.kind, ready)
        await asyncio.sleep(_READINESS_SECONDS)
