"""A gRPC server with call streams, health and reflection, behind a gate for each call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpc.aio
from kvrouter.net import trace_context
from kvrouter.net.calls import SERVICE as CALL_STREAM_SERVICE
from kvrouter.net.calls import CallStreamCounts, CallStreamServer, PeerCheck
from kvrouter.net.calls.server_call import Context
from kvrouter.net.http2.options import MAX_CALLS, SERVER_OPTIONS
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.standard_services import SERVICE as HEALTH_SERVICE
from kvrouter.net.rpc.standard_services import HealthService, add_reflection
from kvrouter.net.tls import Tls, add_port


class BindFailed(Exception):
    """An address cannot be listened on: it is in use, or not an address of this machine."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: it is in use, or not an address of this machine")


class GrpcServer:
    """Serves methods by their handlers. Add services, start it, and stop it in the end."""

    def __init__(
        self,
        check: PeerCheck | None = None,
        *,
        tls: Tls | None = None,
        max_calls: int = MAX_CALLS,
        call_stream_counts: CallStreamCounts | None = None,
        reuse_port: bool = False,
    ) -> None:
        """Creates a server without a port.

        Args:
            check: Decides which methods a peer may call; None permits all.
            tls: Encrypts the connections; None for plain text.
            max_calls: Maximum number of running admitted calls.
            call_stream_counts: Counts of the call streams; new ones by default.
            reuse_port: Whether other processes may listen on the same port.
        """
        self.gate = CallGate(check, max_calls=max_calls)
        """Admits the calls."""
        self.call_streams = CallStreamServer(counts=call_stream_counts, check=check)
        """The call streams."""
        self.call_streams.on_opening = self.gate.conduct.opened
        self.health = HealthService()
        """Answers grpc.health."""
        self.services: list[str] = []
        """Full names of the services."""
        self._tls = tls
        options = dict(SERVER_OPTIONS) | {"grpc.so_reuseport": int(reuse_port)}
        self._server = grpc.aio.server(interceptors=[self.gate], options=list(options.items()))

    def add(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        """Serves a service by handlers of its methods, before the start."""
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))
        self.services.append(service)

    async def start(self, bind: str) -> int:
        """Listens on ``host:port`` and returns the port.

        Raises:
            BindFailed: the port is in use or the address is not one of this machine's.
            InvalidTls: TLS is enabled without a certificate.
        """
        self.call_streams.register(self._server)
        self.health.register(self._server)
        add_reflection(self._server, [*self.services, CALL_STREAM_SERVICE, HEALTH_SERVICE])
        try:
            port = add_port(self._server, bind, self._tls)
        except RuntimeError:
            raise BindFailed(bind) from None
        self.gate.conduct.port = port
        await self._server.start()
        return port

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, cancels running ones after ``grace_seconds``, and closes all connections."""
        await self._server.stop(grace_seconds)


def received_trace_context(context: Context) -> str:
    """Returns the trace context (W3C traceparent) of a call; empty for none."""
    for key, value in context.invocation_metadata() or ():
        if key == trace_context.HEADER:
            return trace_context.checked(value) if isinstance(value, str) else ""
    return ""
