"""Hosts the services of one process: registration, gRPC server, readiness, and draining."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import structlog
from google.protobuf.descriptor import ServiceDescriptor
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.net.ticks import tick
from kvrouter.runtime.contracts import SERVICES
from kvrouter.runtime.process.context import Runtime
from kvrouter.runtime.rpc import Guard, RpcServer
from kvrouter.runtime.telemetry.connection_metrics import expose_servers
from kvrouter.runtime.telemetry.health import readiness_gauge
from kvrouter.runtime.telemetry.metrics import serving_ops
from kvrouter.v1.message_limits import DEFAULT_LIMITS, MessageLimits
from kvrouter.v1.registry_pb2 import ServiceRegistration

log = structlog.get_logger(component="hosting")

_READINESS_SECONDS = 0.05
"""Interval of readiness checks until all services are ready, seconds."""
_READY_SECONDS = 0.4
"""The same from then on, with other timers of the process."""


@dataclass(frozen=True, slots=True)
class Hosted:
    """A service to host."""

    kind: str
    """indexer, scheduler or frontend."""
    implementation: object
    ready: Callable[[], bool]
    """Whether the service can work; called often, so it must be cheap."""
    http_endpoint: str = ""
    """Address of the service's own HTTP API, host:port; empty for that of the ops server."""
    limits: MessageLimits = DEFAULT_LIMITS
    """Size limits of a request."""
    guard: Guard | None = None
    """Decides which calls may run; None for all."""

    @property
    def descriptor(self) -> ServiceDescriptor:
        """The service in the contract."""
        return SERVICES[self.kind]


async def host(
    runtime: Runtime,
    services: Sequence[Hosted],
    stopping: asyncio.Event,
    *,
    started: Callable[[RpcServer], None] | None = None,
    reuse_port: bool = False,
    internal: Sequence[tuple[ServiceDescriptor, object]] = (),
) -> None:
    """Serves until ``stopping`` is set, then withdraws the registrations and drains.

    Args:
        runtime: Shared resources; its settings have the addresses to listen on.
        services: The services, on one gRPC server.
        stopping: Event to stop the services.
        started: Called with the server once it listens.
        reuse_port: Whether processes share the gRPC port, which their parent holds (``shared_port``).
        internal: Services on the same server for processes that know its address; they are not registered.

    Raises:
        BindFailed: an address cannot be listened on.
    """
    settings = runtime.settings
    counts = runtime.call_streams.server()
    server = RpcServer(
        settings.bind, call_stream_counts=counts, reuse_port=reuse_port, tls=runtime.tls, callers=runtime.callers
    )
    expose_servers(runtime.registry, lambda: [server.grpc])
    readiness = readiness_gauge(runtime.registry)
    for service in services:
        readiness.labels(service.kind).set_function(partial(server.health.is_ready, service.descriptor.full_name))
        server.add_service(service.descriptor, service.implementation, limits=service.limits, guard=service.guard)
    for descriptor, implementation in internal:
        server.add_service(descriptor, implementation)
    async with serving_ops(settings, runtime.registry, server.health, runtime.tls) as ops_address:
        await server.start()
        for descriptor, _ in internal:
            server.health.set_ready(descriptor.full_name)
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
        await tick(_READY_SECONDS if all(known.values()) else _READINESS_SECONDS)


_Address = tuple[socket.AddressFamily, tuple[str, int]]


@contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """Holds a port while the context lasts; yields its number. Child processes listen on it with ``SO_REUSEPORT``.

    With ``SO_REUSEPORT`` the kernel spreads connections over all processes listening on a port, and admits any process
    of the same user. So the port is first taken exclusively, and then held by a socket without listening.

    Args:
        host: Address to listen on; empty for all addresses.
        port: The port; 0 chooses a free one.

    Raises:
        BindFailed: another process listens on the port or holds it, or the address is not one of this machine's.
    """
    with ExitStack() as held:
        try:
            for family, address in _addresses(host, port):
                holder = _hold(family, (address[0], port))
                held.enter_context(holder)
                port = holder.getsockname()[1]
        except OSError:
            raise BindFailed(f"{host}:{port}") from None
        yield port


def _addresses(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, (str(address[0]), port)) for family, _, _, _, address in found))


def _hold(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    with _bound(family, address) as exclusive:
        # Listening fails if another process listens, whatever options its socket has.
        exclusive.listen(1)
        exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder = _bound(family, (address[0], exclusive.getsockname()[1]), socket.SO_REUSEPORT)
    # Without this option, a later socket must share the port knowingly, even while no child listens.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return holder


def _bound(family: socket.AddressFamily, address: tuple[str, int], *options: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier process may linger on the port.
        for option in (socket.SO_REUSEADDR, *options):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
