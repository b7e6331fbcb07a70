"""A TCP or TLS connection with one gRPC call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

from kvrouter.net.grpc_connection.http2_call import Http2Call, Metadata
from kvrouter.net.grpc_options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from kvrouter.net.tls.tls import Tls

_CHECK_SECONDS = KEEPALIVE_TIMEOUT_MS / 1000
_CHECKS_TO_PING = KEEPALIVE_MS // KEEPALIVE_TIMEOUT_MS


class ConnectionLost(Exception):
    """The connection could not be made, or it or its call has ended."""


class GrpcConnection(asyncio.Protocol):
    """A connection with one call, which begins with a message of each side."""

    def __init__(self, call: Http2Call) -> None:
        """Connects nothing yet; see ``open``."""
        self._call = call
        call.on_message = self._receive_first
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._first: asyncio.Future[bytes] = self._loop.create_future()
        # Nobody may wait for them.
        self._ended.add_done_callback(_retrieve)
        self._first.add_done_callback(_retrieve)
        self._early: list[bytes] = []
        """Messages between the server's first one and ``start``."""
        self._next_message: Callable[[], bytes | None] = lambda: None
        self._transport: asyncio.Transport | None = None
        self._writing_paused = False
        self._woken = False
        self._heard = True
        self._silent_checks = 0
        self._check: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        target: str,
        path: str,
        *,
        tls: Tls | None = None,
        role: str = "",
        metadata: Metadata = (),
        max_message_bytes: int,
    ) -> GrpcConnection:
        """Connects and starts the call.

        Args:
            target: Address of the server, host:port.
            path: Path of the method, such as /kvrouter.v1.CallStreamService/OpenCallStream.
            tls: Encrypts the connection and checks the server's certificate; None for plain text.
            role: What the server is, for the name in its certificate.
            metadata: Metadata of the call. It may be secret.
            max_message_bytes: Maximum size of a message of the server.

        Raises:
            ConnectionLost: there is no connection to the address, or its certificate is not accepted.
        """
        scheme = "http" if tls is None else "https"
        connection = cls(Http2Call(path, target, scheme, metadata, max_message_bytes=max_message_bytes))
        try:
            host, port = _address(target)
            await connection._loop.create_connection(
                lambda: connection,
                host,
                port,
                ssl=None if tls is None else tls.call_context(),
                server_hostname=None if tls is None else tls.peer_name(role) or host,
            )
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"UNAVAILABLE: cannot connect to {target}: {error}") from None
        return connection

    async def exchange(self, message: bytes) -> bytes:
        """Sends the first message and returns the server's.

        Raises:
            ConnectionLost: the call or the connection has ended.
            Http2Violation: the server broke a rule of HTTP/2.
        """
        self._call.send(message)
        self.wake()
        return await self._first

    def start(self, on_message: Callable[[bytes], None], next_message: Callable[[], bytes | None]) -> None:
        """Starts the exchange of all other messages. The functions are called from the event loop and must not block.

        Args:
            on_message: Called with each message of the server.
            next_message: Returns the next message to send, when there is room for one; None if none waits.

        An exception of either ends the call.
        """
        self._call.on_message = on_message
        self._next_message = next_message
        early, self._early = self._early, []
        try:
            for message in early:
                on_message(message)
        except Exception as error:
            self.end(error)
        self.wake()

    def wake(self) -> None:
        """Sends what ``next_message`` returns, after the callbacks that are ready, so that they share a message."""
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._flush)

    async def wait_ended(self) -> None:
        """Waits for the end of the call.

        Raises:
            ConnectionLost: the call or the connection has ended.
            Http2Violation: the server broke a rule of HTTP/2.
            Exception: a function of ``start`` has raised it, or it was passed to ``end``.
        """
        await asyncio.shield(self._ended)

    def end(self, error: Exception) -> None:
        """Ends the call with an error, unless it has ended."""
        for awaited in (self._ended, self._first):
            if not awaited.done():
                awaited.set_exception(error)
        if self._check is not None:
            self._check.cancel()

    def close(self) -> None:
        """Cancels the call and closes the connection."""
        self.end(ConnectionLost("the connection was closed"))
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._call.cancel()
        transport.write(self._call.take())
        if transport.get_write_buffer_size():
            # The server does not read, so the rest would wait for good.
            transport.abort()
        else:
            transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connected: socket.socket = transport.get_extra_info("socket")
            # A peer that vanished acknowledges nothing. TCP alone would wait a quarter of an hour.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_MS)
        self._check = self._loop.call_later(_CHECK_SECONDS, self._check_heard)
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements asyncio.Protocol."""
        self.end(ConnectionLost(f"UNAVAILABLE: the connection was lost: {exc or 'closed by the server'}"))

    def pause_writing(self) -> None:
        """Implements asyncio.Protocol."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Implements asyncio.Protocol."""
        self._writing_paused = False
        self.wake()

    def data_received(self, data: bytes) -> None:
        """Implements asyncio.Protocol."""
        if self._ended.done():
            return
        self._heard = True
        call = self._call
        try:
            call.receive(data)
        except Exception as error:
            self.end(error)
            return
        if call.ended is not None:
            code, details = call.ended
            self.end(ConnectionLost(f"{code.name}: {details}"))
        elif call.waiting:
            self.wake()

    def _receive_first(self, message: bytes) -> None:
        if self._first.done():
            self._early.append(message)
        else:
            self._first.set_result(message)

    def _flush(self) -> None:
        self._woken = False
        call, transport = self._call, self._transport
        if transport is None or self._ended.done():
            return
        while not self._writing_paused:
            try:
                if not call.blocked and (message := self._next_message()) is not None:
                    call.send(message)
            except Exception as error:
                self.end(error)
                return
            data = call.take()
            if not data:
                return
            transport.write(data)

    def _check_heard(self) -> None:
        """Detects a server that has vanished, as gRPC's keepalive does."""
        self._silent_checks = 0 if self._heard else self._silent_checks + 1
        self._heard = False
        if self._silent_checks > _CHECKS_TO_PING:
            self.end(ConnectionLost("UNAVAILABLE: the server does not answer pings"))
            return
        if self._silent_checks == _CHECKS_TO_PING:
            self._call.ping()
            self.wake()
        self._check = self._loop.call_later(_CHECK_SECONDS, self._check_heard)


def _address(target: str) -> tuple[str, int]:
    """Returns host and port.

    Raises:
        ValueError: the target is not of the form host:port.
    """
    address = urlsplit(f"//{target}")
    if address.hostname is None or address.port is None:
        raise ValueError(f"expected an address of the form host:port, received {target}")
    return address.hostname, address.port


def _retrieve(awaited: asyncio.Future[Any]) -> None:
    """Retrieves the exception, so that asyncio does not report it."""
    if not awaited.cancelled():
        awaited.exception()
