"""The gRPC server of the endpoint picker: external processing, health, and reflection, on an address of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import structlog
from envoy.service.ext_proc.v3 import external_processor_pb2
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from kvrouter.frontend.proxy.endpoint_picker.exchange import Exchange, PickerMetrics
from kvrouter.frontend.proxy.endpoint_picker.picker import Picker
from kvrouter.net.http2.received_call import MAX_RECEIVED_BYTES, ReceivedCall
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.net.rpc.peer_conduct import EvictableCalls, PeerConduct
from kvrouter.net.rpc.server import HEALTH_SERVICE, HealthService, add_reflection
from kvrouter.net.tls import Tls
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.telemetry.connection_metrics import expose_conduct
from kvrouter.v1.errors import KvRouterError
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="endpoint-picker")

SERVICE = external_processor_pb2.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name
_LIVENESS, _READINESS = "liveness", "readiness"
_READINESS_SECONDS = 0.05
"""Interval of readiness checks."""
_OPENING_SECONDS = 10.0
"""Time for the headers of a request to arrive, and for the gateway to end the stream of a refused one."""
_MOST_OPENING = 1024
"""Streams without a caller, yet or at all. A further one ends the oldest."""
_STOP_SECONDS = 0.5
"""Time for refused requests to reach the gateway before connections are closed."""


class EndpointPickerService(ExternalProcessorServicer):  # type: ignore[misc]  # The base class is not typed.
    """Envoy's external processing service."""

    def __init__(self, picker: Picker, metrics: PickerMetrics, conduct: PeerConduct) -> None:
        """``conduct`` closes the connections of peers that open streams without requests that count."""
        self._conduct = conduct
        self.opening = EvictableCalls(_MOST_OPENING)
        """Streams without a caller, yet or at all."""
        self._picker = picker
        self._metrics = metrics
        self._idle = asyncio.Event()
        self._idle.set()
        self.running = 0
        """Number of requests in progress."""
        metrics.running.set_function(lambda: self.running)

    async def wait_idle(self) -> None:
        """Returns when no request is in progress."""
        await self._idle.wait()

    async def Process(self, request_iterator: Any, context: ReceivedCall) -> None:  # noqa: ARG002, N802 - gRPC's names
        """Processes one HTTP request of the gateway. A picker that is not ready leaves it to the gateway."""
        if not self._picker.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the endpoint picker is not ready")
        self.running += 1
        self._idle.clear()
        try:
            if not await self._exchange(context):
                self._conduct.without_credential(context)
                await context.abort(
                    grpc.StatusCode.DEADLINE_EXCEEDED, "no request of a caller came in time, or others came"
                )
        except KvRouterError as error:
            self._conduct.without_credential(context)
            log.warning("gateway.refused", cause=error.message)
            await context.abort(error.code, str(error))
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def _exchange(self, context: ReceivedCall) -> bool:
        """Processes a request. Returns False if its stream was ended because it brought no caller in time."""
        exchange = Exchange(context, self._picker, self._metrics)
        # Headers that came with the call take no time that needs a limit.
        if not (context.is_ready and await exchange.open()):
            timeout = asyncio.timeout(_OPENING_SECONDS)
            try:
                async with timeout:
                    with self.opening.running(timeout):
                        if not await exchange.open():
                            if exchange.has_headers:
                                self._conduct.without_credential(context)
                            await exchange.run()
                            return True
            except TimeoutError:
                if not timeout.expired():
                    raise
                return False
        self._conduct.admitted(context)
        await exchange.run()
        return True


@asynccontextmanager
async def serving_picker(picker: Picker, registry: CollectorRegistry, tls: Tls | None = None) -> AsyncIterator[str]:
    """Serves the endpoint picker while the context lasts; yields its address, host:port.

    Args:
        picker: Chooses endpoints. Its settings have the address to listen on.
        registry: Registry for the metrics and the bounds of the server.
        tls: Encrypts connections; None for plain text.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    bind, drain_seconds = picker.settings.endpoint_picker_bind, picker.settings.drain_seconds
    gate = CallGate(admits=False)
    server = LoopServer(gate, tls=tls)
    service = EndpointPickerService(picker, PickerMetrics(registry), gate.conduct)
    expose_conduct(registry, lambda: [gate.conduct])
    bounds = bounds_of(registry)
    bounds.add("picker_received_bytes", lambda: server.received.bytes, MAX_RECEIVED_BYTES)
    bounds.add("picker_opening_streams", lambda: len(service.opening), _MOST_OPENING, when_full="evicts")
    add_ExternalProcessorServicer_to_server(service, server)
    health = HealthService()
    health.register(server)
    add_reflection(server, [SERVICE, HEALTH_SERVICE])
    health.set(_LIVENESS, True)
    _publish(health, ready=False)
    port = await server.start(bind)
    address = f"{bind.rpartition(':')[0]}:{port}"
    log.info("grpc.listening", address=address, services=[SERVICE], encrypted=tls is not None)
    following = [
        asyncio.create_task(_follow_readiness(health, picker), name="endpoint-picker-health"),
        asyncio.create_task(picker.addresses.run(), name="endpoint-picker-addresses"),
    ]
    try:
        yield address
    finally:
        for task in following:
            task.cancel()
        await asyncio.wait(following)
        _publish(health, ready=False)
        try:
            async with asyncio.timeout(drain_seconds):
                await service.wait_idle()
        except TimeoutError:
            log.warning("calls.cut_off", calls=service.running, after_seconds=drain_seconds)
        await server.stop(_STOP_SECONDS)


async def _follow_readiness(health: HealthService, picker: Picker) -> None:
    ready = False
    while True:
        if picker.ready != ready:
            ready = picker.ready
            _publish(health, ready=ready)
        await asyncio.sleep(_READINESS_SECONDS)


def _publish(health: HealthService, *, ready: bool) -> None:
    for name in (SERVICE, _READINESS, ""):
        health.set(name, ready)
