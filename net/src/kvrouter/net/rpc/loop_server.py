"""A gRPC server on the event loop, for calls of many small messages.

grpc.aio reads in a thread and wakes the event loop for each operation. Here, the messages of all calls of a connection
that arrive together are one read, and their answers one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from kvrouter.net.http2.options import MAX_PENDING_CALLS
from kvrouter.net.http2.received_calls import Received, ReceivedCall
from kvrouter.net.http2.server_connection import ServerConnection
from kvrouter.net.logs import get_logger
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.server import BindFailed, Handlers
from kvrouter.net.tls import Tls, check_port

log = get_logger(__name__)

_HANDSHAKE_SECONDS = 10.0
_ANY_HOST = ("", "0.0.0.0", "::")  # noqa: S104 - as gRPC, which listens for both families then


@dataclass(slots=True)
class _Details:
    """Implements grpc.HandlerCallDetails."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


class LoopServer(Handlers):
    """Serves the methods a gate admits. Add handlers as to a grpc.aio.Server, start it, and stop it in the end."""

    def __init__(self, gate: CallGate) -> None:
        """Creates a server without a port."""
        self.received = Received()
        """Size of the messages it holds, at most ``received_calls.MAX_RECEIVED_BYTES``."""
        self._gate = gate
        self._services: list[grpc.GenericRpcHandler] = []
        self._connections: set[ServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Implements grpc.aio.Server."""
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Implements grpc.aio.Server. The handlers are those of ``add_generic_rpc_handlers``."""

    async def start(self, bind: str, tls: Tls | None) -> int:
        """Listens on ``host:port`` and returns the port.

        Raises:
            BindFailed: the port is in use or the address is not one of this machine's.
            InvalidTls: TLS is enabled without a certificate.
        """
        check_port(bind, tls)
        host, _, port = bind.rpartition(":")
        host = host.strip("[]")
        encrypted: dict[str, Any] = {}
        if tls is not None:
            encrypted = {"ssl": tls.server_context(grpc=True), "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: ServerConnection(self._connections, self.received, self._begin),
                None if host in _ANY_HOST else host,
                int(port),
                backlog=MAX_PENDING_CALLS,
                **encrypted,
            )
        except (OSError, ValueError):
            raise BindFailed(bind) from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, cancels running ones after ``grace_seconds``, and closes all connections."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.calls.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        for connection in list(self._connections):
            connection.end(ConnectionError("the server stops"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, call: ReceivedCall) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.on_cancelled = task.cancel

    async def _serve(self, call: ReceivedCall) -> None:
        try:
            handler = await self._gate.intercept_service(self._find, _Details(call.path))
            call.parse, call.serialize = handler.request_deserializer, handler.response_serializer
            await handler.stream_stream(call.requests() if call.parse else None, call)
        except grpc.aio.AbortError:
            pass
        except Exception:
            log.exception("call.failed", method=call.path)
            call.set_code(grpc.StatusCode.UNKNOWN)
            call.set_details("the call failed; the server's log has the cause")
        call.on_cancelled = lambda: None
        call.finish()

    async def _find(self, details: Any) -> Any:
        found = (service.service(details) for service in self._services)
        return next((handler for handler in found if handler is not None), None)
