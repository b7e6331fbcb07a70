"""A gRPC server on the event loop.

grpc.aio reads in a thread and wakes the event loop for each operation. Here, the messages of all calls of a connection
that arrive together are one read, and their answers one write.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from kvrouter.net.http2 import ConnectionLost
from kvrouter.net.http2.connecting import family_of
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.server_connection import ServerConnection
from kvrouter.net.logs import get_logger
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.tls import Tls, check_port

log = get_logger(__name__)

_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 4_096
"""Maximum number of new connections that wait for the event loop."""
_RANDOM_PORTS = 8
"""Ports to try for a host with several addresses, if the caller names none."""
_BOTH_FAMILIES = "::"
_ANY_HOST = ("", "0.0.0.0", _BOTH_FAMILIES)  # noqa: S104 - as gRPC, which listens for both families then


class BindFailed(Exception):
    """An address cannot be listened on: it is in use, or not an address of this machine."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: it is in use, or not an address of this machine")


class LoopServer:
    """Serves the methods a gate admits. Add handlers, start it, and stop it in the end."""

    def __init__(self, gate: CallGate, *, tls: Tls | None = None, reuse_port: bool = False) -> None:
        """Creates a server without a port.

        Args:
            gate: Admits the calls.
            tls: Encrypts the connections; None for plain text.
            reuse_port: Whether other processes may listen on the same port.
        """
        self.received = Received()
        """Size of the messages it holds, at most ``received_call.MAX_RECEIVED_BYTES``."""
        self.gate = gate
        """Admits the calls."""
        self._tls = tls
        self._reuse_port = reuse_port
        self._methods: dict[str, Callable[[ReceivedCall], Awaitable[None]]] = {}
        """How calls are served, by path."""
        self.connections: set[ServerConnection] = set()
        """The open connections."""
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        """One for each address of the host."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Serves a service by grpc.RpcMethodHandlers of its methods, which gRPC's generated code makes."""
        for name, handler in handlers.items():
            method = f"{service}/{name}"
            self._methods[f"/{method}"] = self.gate.gated(handler, method)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: gRPC's generated code adds each handler by its name as well."""

    async def start(self, bind: str) -> int:
        """Listens on ``host:port`` and returns the port.

        Raises:
            BindFailed: the port is in use or the address is not one of this machine's.
            InvalidTls: TLS is enabled without a certificate.
        """
        check_port(bind, self._tls)
        encrypted: dict[str, Any] = {}
        if self._tls is not None:
            encrypted = {"ssl": self._tls.server_context(grpc=True), "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        loop = asyncio.get_running_loop()
        host, _, port_text = bind.rpartition(":")
        try:
            listening = self._listen(await self._addresses(host.strip("[]")), int(port_text))
            for each in listening:
                server = await loop.create_server(
                    lambda: ServerConnection(self._opened, self.connections.discard, self.received, self._begin),
                    sock=each,
                    backlog=_BACKLOG,
                    **encrypted,
                )
                self._servers.append(server)
        except (OSError, ValueError, OverflowError):
            self._close()
            raise BindFailed(bind) from None
        return int(listening[0].getsockname()[1])

    def _listen(
        self, addresses: Sequence[tuple[int, str]], port: int, attempts: int = _RANDOM_PORTS
    ) -> list[socket.socket]:
        """Returns sockets for all addresses, with one port. A random port of one family may be in use in the other."""
        listening: list[socket.socket] = []
        try:
            for family, address in addresses:
                listening.append(
                    socket.create_server(
                        (address, listening[0].getsockname()[1] if listening else port),
                        family=family,
                        reuse_port=self._reuse_port,
                        dualstack_ipv6=address == _BOTH_FAMILIES,
                    )
                )
        except OSError:
            for each in listening:
                each.close()
            if port or attempts == 1:
                raise
            return self._listen(addresses, port, attempts - 1)
        return listening

    async def _addresses(self, host: str) -> list[tuple[int, str]]:
        """Returns the addresses of a host, each with its family."""
        if host in _ANY_HOST:
            return [(socket.AF_INET6, _BOTH_FAMILIES) if socket.has_dualstack_ipv6() else (socket.AF_INET, "")]
        if (family := family_of(host)) is not None:
            return [(family, host)]  # Without a thread, which resolves names.
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))

    def _opened(self, connection: ServerConnection) -> None:
        self.connections.add(connection)
        if self._is_stopping:
            # Accepted before, it opens only now, at the end of its handshake.
            connection.end(ConnectionLost("the server stops"))

    def _close(self) -> None:
        for server in self._servers:
            server.close()

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, cancels running ones after ``grace_seconds``, and closes all connections."""
        self._is_stopping = True
        self._close()
        for connection in self.connections:
            connection.calls.drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_seconds)
        for connection in list(self.connections):
            connection.end(ConnectionLost("the server stops"))
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _begin(self, call: ReceivedCall) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(call))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._ended(task, call))
        call.on_cancelled = task.cancel

    def _ended(self, task: asyncio.Task[None], call: ReceivedCall) -> None:
        self._tasks.discard(task)
        if not call.is_served:
            # The client left it before it was checked.
            self.gate.conduct.without_credential(call)

    async def _serve(self, call: ReceivedCall) -> None:
        call.is_served = True
        try:
            await self._methods.get(call.path, self.gate.refuse_unknown)(call)
        except grpc.aio.AbortError:
            pass
        except Exception:
            log.exception("call.failed", method=call.path)
            call.set_code(grpc.StatusCode.UNKNOWN)
            call.set_details("the call failed; the server's log has the cause")
        except asyncio.CancelledError:
            # The client has left, or the handler cancelled itself. If the task ended with the exception, it would keep
            # the call until the garbage collector runs.
            call.set_code(grpc.StatusCode.CANCELLED)
        call.on_cancelled = _ignore
        call.finish()


def _ignore() -> None:
    pass
