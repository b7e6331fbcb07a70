"""A gRPC server with call streams, health and reflection, behind a gate for each call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2
from kvrouter.net import trace_context
from kvrouter.net.calls import SERVICE as CALL_STREAM_SERVICE, CallStreamCounts, CallStreamServer, PeerCheck
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.net.tls import Tls


class GrpcServer(LoopServer):
    """Serves services, call streams, health and reflection. Add services, start it, and stop it in the end."""

    def __init__(
        self,
        check: PeerCheck | None = None,
        *,
        tls: Tls | None = None,
        call_stream_counts: CallStreamCounts | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Creates a server without a port.

        Args:
            check: Decides which methods a peer may call; None permits all.
            tls: Encrypts the connections; None for plain text.
            call_stream_counts: Counts of the call streams; new ones by default.
            reuse_port: Whether other processes may listen on the same port.
        """
        super().__init__(CallGate(check), tls=tls, reuse_port=reuse_port)
        self.call_streams = CallStreamServer(counts=call_stream_counts, check=check)
        """The call streams."""
        self.call_streams.on_opening = self.gate.conduct.opened
        self.health = HealthService()
        """Answers grpc.health."""
        self.services: list[str] = []
        """Full names of the services."""

    def add(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serves a service by handlers of its methods, before the start."""
        self.add_registered_method_handlers(service, handlers)
        self.services.append(service)

    async def start(self, bind: str) -> int:
        """Listens on ``host:port`` and returns the port.

        Raises:
            BindFailed: the port is in use or the address is not one of this machine's.
            InvalidTls: TLS is enabled without a certificate.
        """
        self.add_registered_method_handlers(CALL_STREAM_SERVICE, self.call_streams.handlers())
        self.health.register(self)
        add_reflection(self, [*self.services, CALL_STREAM_SERVICE, HEALTH_SERVICE])
        return await super().start(bind)


def received_trace_context(context: ReceivedCall) -> str:
    """Returns the trace context (W3C traceparent) of a call; empty for none."""
    for key, value in context.invocation_metadata():
        if key == trace_context.HEADER:
            return trace_context.checked(value) if isinstance(value, str) else ""
    return ""


HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the service, for reflection."""

_SERVING = HealthCheckResponse.SERVING
_NOT_SERVING = HealthCheckResponse.NOT_SERVING


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # The base class is not typed.
    """Answers with the status of services by their full names. The empty name stands for all of them.

    The servicer of grpcio-health-checking writes to each watching client while it holds the lock a change of the
    status needs, and keeps every name of clients' requests.
    """

    def __init__(self) -> None:
        self.serving: dict[str, bool] = {}
        """Whether each service works."""
        self._changed = asyncio.Event()

    def set(self, service: str, serving: bool) -> None:
        """Sets whether a service works."""
        if self.serving.get(service) != serving:
            self.serving[service] = serving
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def register(self, server: LoopServer) -> None:
        """Adds the service to a gRPC server before its start."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def Check(self, request: HealthCheckRequest, context: ReceivedCall) -> HealthCheckResponse | None:  # noqa: N802 - gRPC's name
        """Implements grpc.health.v1.Health."""
        serving = self.serving.get(request.service)
        if serving is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return None
        return HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    async def Watch(self, request: HealthCheckRequest, context: ReceivedCall) -> None:  # noqa: N802 - gRPC's name
        """Implements grpc.health.v1.Health."""
        service = request.service[:_MAX_NAME]
        last: HealthCheckResponse.ServingStatus.ValueType | None = None
        while True:
            changed, serving = self._changed, self.serving.get(service)
            status = HealthCheckResponse.SERVICE_UNKNOWN if serving is None else _SERVING if serving else _NOT_SERVING
            if status != last:
                last = status
                await context.write(HealthCheckResponse(status=status))
            await changed.wait()


_MAX_NAME = 256
"""Characters kept of a name; no service has a longer one."""


V1_SERVICE = "grpc.reflection.v1.ServerReflection"
"""Full name of version 1, of which grpcio-reflection has no descriptor: it is served but not listed."""


def add_reflection(server: LoopServer, services: Iterable[str]) -> None:
    """Serves the descriptors of a server's services to tools such as grpcurl and buf.

    grpcio-reflection serves v1alpha only; the messages of v1 have the same encoding, so one servicer answers both.

    Args:
        server: The server, not started yet.
        services: Full names of its services.
    """
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in (reflection.SERVICE_NAME, V1_SERVICE):
        server.add_registered_method_handlers(service, {"ServerReflectionInfo": info})
