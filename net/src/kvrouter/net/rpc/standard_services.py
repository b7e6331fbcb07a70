"""Serves grpc.health.v1 and server reflection.

The servicer of grpcio-health-checking writes to each watching client while it holds the lock a change of the
status needs, and keeps every name of clients' requests. grpcio-reflection serves v1alpha only; the messages of v1 have
the same encoding, so one servicer answers both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from kvrouter.net.calls import Context

SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
"""Full name of the service, for reflection."""

_SERVING = HealthCheckResponse.SERVING
_NOT_SERVING = HealthCheckResponse.NOT_SERVING


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # The base class is not typed.
    """Answers with the status of services by their full names. The empty name stands for all of them."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    @property
    def serving(self) -> Mapping[str, bool]:
        """Whether each service works."""
        return self._serving

    def set(self, service: str, serving: bool) -> None:
        """Sets whether a service works."""
        if self._serving.get(service) != serving:
            self._serving[service] = serving
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a gRPC server before its start."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse | None:  # noqa: N802 - gRPC's name
        """Implements grpc.health.v1.Health."""
        serving = self._serving.get(request.service)
        if serving is None:
            context.set_code(grpc.StatusCode.NOT_FOUND)
            return None
        return HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:  # noqa: N802 - gRPC's name
        """Implements grpc.health.v1.Health."""
        service = request.service[:_MAX_NAME]
        last: HealthCheckResponse.ServingStatus.ValueType | None = None
        while True:
            changed, serving = self._changed, self._serving.get(service)
            status = HealthCheckResponse.SERVICE_UNKNOWN if serving is None else _SERVING if serving else _NOT_SERVING
            if status != last:
                last = status
                await _write(context, HealthCheckResponse(status=status))
            await changed.wait()


_MAX_NAME = 256
"""Characters kept of a name; no service has a longer one."""
_WRITE_SECONDS = 1.0
"""Time for a write to complete after its call was cancelled, seconds."""


async def _write(context: Context, response: HealthCheckResponse) -> None:
    """Writes a response. A call cancelled meanwhile waits for it: gRPC cannot end a call before a write."""
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait({writing}, timeout=_WRITE_SECONDS)
        writing.cancel()
        raise


V1_SERVICE = "grpc.reflection.v1.ServerReflection"
"""Full name of version 1, of which grpcio-reflection has no descriptor: it is served but not listed."""


def add_reflection(server: grpc.aio.Server, services: Iterable[str]) -> None:
    """Serves the descriptors of a server's services to tools such as grpcurl and buf.

    Args:
        server: The server, not started yet.
        services: Full names of its services.
    """
    servicer = reflection.aio.ReflectionServicer([*services, reflection.SERVICE_NAME])
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": info})
    server.add_generic_rpc_handlers((handler,))
