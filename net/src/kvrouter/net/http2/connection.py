"""A TCP or TLS connection with one gRPC call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self, cast

from kvrouter.net.http2.connecting import addresses_of, first_connection, host_and_port
from kvrouter.net.http2.endpoint import ConnectionLost, Endpoint
from kvrouter.net.http2.http2_call import Http2Call
from kvrouter.net.http2.metadata import Metadata
from kvrouter.net.http2.side import Http2Violation
from kvrouter.net.tls.tls import Tls

_CONNECT_SECONDS = 2.0
_MAX_EARLY = 16
"""Messages a server may send after its first one before the client has processed it."""


class GrpcConnection(Endpoint):
    """A connection with one call. That of a call stream begins with a message of each side; see ``exchange``."""

    def __init__(self, call: Http2Call) -> None:
        """Connects nothing yet; see ``open``."""
        super().__init__()
        self.call = call
        """The call."""
        call.on_messages = self._receive_first
        call.wake = self.wake
        self.on_going_away: Callable[[], None] = _ignore
        """Called when ``going_away`` becomes true."""
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._answered: asyncio.Future[None] = self._loop.create_future()
        """Done when the server has sent its first frames."""
        self._first: asyncio.Future[bytes] = self._loop.create_future()
        # Nobody may wait for them.
        for awaited in (self._ended, self._answered, self._first):
            awaited.add_done_callback(_retrieve)
        self._early: list[bytes] = []
        """Messages between the server's first one and ``start``."""
        self._next_message: Callable[[], bytes | None] = lambda: None
        self._reported_going_away = False

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
        within_seconds: float = _CONNECT_SECONDS,
    ) -> Self:
        """Connects to the first live address of the server, and starts the call.

        Args:
            target: Address of the server, host:port.
            path: Path of the method, such as /kvrouter.v1.CallStreamService/OpenCallStream.
            tls: Encrypts the connection and checks the server's certificate; None for plain text.
            role: Role of the server, for the name in its certificate.
            metadata: Metadata of the call. It may be secret.
            max_message_bytes: Maximum size of a message of the server.
            within_seconds: Time in which every address of the server must be tried, seconds. The caller ends the
                attempt when its own time is up.

        Raises:
            ConnectionLost: no address answers, or its certificate is not accepted.
            Http2Violation: the server broke a rule of HTTP/2.
        """
        try:
            host, port = host_and_port(target)
            addresses = await addresses_of(host, port)
        except (OSError, ValueError) as error:
            raise ConnectionLost(f"UNAVAILABLE: cannot connect to {target}: {error}") from None

        async def connect(address: str) -> Self:
            scheme = "http" if tls is None else "https"
            call = Http2Call(path, target, scheme, metadata, max_message_bytes=max_message_bytes)
            connection = cls(call)
            try:
                await connection._loop.create_connection(
                    lambda: connection,
                    address,
                    port,
                    ssl=None if tls is None else tls.call_context(),
                    server_hostname=None if tls is None else tls.peer_name(role) or host,
                )
                await connection._answered
            except BaseException as error:
                connection.close()
                if isinstance(error, OSError | ValueError):
                    raise ConnectionLost(f"UNAVAILABLE: cannot connect to {target} at {address}: {error}") from None
                raise
            return connection

        if len(addresses) == 1:
            return await connect(addresses[0])
        try:
            return await first_connection(addresses, connect, within_seconds)
        except ExceptionGroup as failed:
            raise _cause(failed) from None

    async def exchange(self, message: bytes) -> bytes:
        """Sends the first message and returns the server's.

        Raises:
            ConnectionLost: the call or the connection has ended.
            Http2Violation: the server broke a rule of HTTP/2.
        """
        self.call.send(message)
        self.wake()
        return await self._first

    def start(self, on_messages: Callable[[Sequence[bytes]], None], next_message: Callable[[], bytes | None]) -> None:
        """Starts the exchange of all further messages. The functions are called from the event loop and must not block.

        Args:
            on_messages: Called with messages of the server, in order.
            next_message: Returns the next message to send, when there is room for one; None if none waits.

        An exception of either ends the call.
        """
        self.call.on_messages = on_messages
        self._next_message = next_message
        early, self._early = self._early, []
        try:
            if early:
                on_messages(early)
        except Exception as error:
            self.end(error)
        self.wake()

    def on_end(self, ended: Callable[[], None]) -> None:
        """Has a function called when the call ends, and soon if it has ended."""
        self._ended.add_done_callback(lambda _: ended())

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
        for awaited in (self._ended, self._answered, self._first):
            if not awaited.done():
                awaited.set_exception(error)
        if self._check is not None:
            self._check.cancel()

    @property
    def going_away(self) -> bool:
        """Whether the server takes no further calls on this connection. The call goes on."""
        return self.call.going_away

    @property
    def has_unwritten(self) -> bool:
        """Whether a part of the latest message is not written, so the server cannot have processed it."""
        return self.call.blocked

    def close(self) -> None:
        """Cancels the call and closes the connection."""
        self.end(ConnectionLost("the connection was closed"))
        self._close(self._cancelled)

    def _cancelled(self) -> bytes:
        """Cancels the call, and returns the bytes that say so."""
        self.call.cancel()
        return self.call.take()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements asyncio.Protocol."""
        if self._ended.done():
            # Whoever connected has given up.
            cast(asyncio.Transport, transport).abort()
            return
        super().connection_made(transport)

    def _ping(self) -> None:
        self.call.ping()

    def _receive(self, data: bytes) -> None:
        if self._ended.done():
            return
        call = self.call
        try:
            call.receive(data)
        except Exception as error:
            self.end(error)
            return
        if not self._answered.done():
            self._answered.set_result(None)
        if call.ended is not None:
            code, details = call.ended
            self.end(ConnectionLost(f"{code.name}: {details}", never_processed=call.never_processed))
            return
        if call.going_away and not self._reported_going_away:
            self._reported_going_away = True
            self.on_going_away()

    def _receive_first(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            if not self._first.done():
                self._first.set_result(message)
                continue
            if len(self._early) == _MAX_EARLY:
                raise Http2Violation(f"expected at most {_MAX_EARLY} messages after the first one, received more")
            self._early.append(message)

    def _flush(self) -> None:
        self._woken = False
        call, transport = self.call, self._transport
        if transport is None or transport.is_closing() or self._ended.done():
            return
        try:
            while not self._writing_paused:
                if not call.blocked and (message := self._next_message()) is not None:
                    call.send(message)
                if not (data := call.take()):
                    return
                transport.write(data)
        except Exception as error:
            self.end(error)


def _cause(failed: ExceptionGroup[Exception]) -> Exception:
    """Returns one error for the failed attempts at all addresses: a violation rather than others."""
    lost = [error for error in failed.exceptions if isinstance(error, ConnectionLost)]
    for error in failed.exceptions:
        if error not in lost:
            return error
    return lost[0] if len(lost) == 1 else ConnectionLost("; ".join(map(str, lost)))


def _ignore() -> None:
    pass


def _retrieve(awaited: asyncio.Future[Any]) -> None:
    """Retrieves the exception, so asyncio does not report it."""
    if not awaited.cancelled():
        awaited.exception()
