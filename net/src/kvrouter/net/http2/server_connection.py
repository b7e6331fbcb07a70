"""The I/O of one connection of a gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

from kvrouter.net.http2.endpoint import ConnectionLost, Endpoint
from kvrouter.net.http2.received_call import Received, ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Http2Violation
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_MAPPED = "::ffff:"
"""Begins an address of IPv4 on a socket for both families."""
_MOST_IDLE_CHECKS = 30
"""Checks without a call after which a connection is closed; clients connect again when they call."""


class ServerConnection(Endpoint):
    """One connection."""

    bytes_per_us: ClassVar[int] = 50
    """Bytes of requests, in few long messages, processed in a microsecond."""
    slice_bytes: ClassVar[int] = 128 << 10
    """Bytes processed in one turn: enough for a message with the hashes of 128k tokens."""

    def __init__(
        self,
        opened: Callable[[ServerConnection], None],
        closed: Callable[[ServerConnection], None],
        received: Received,
        begin: Callable[[ReceivedCall], None],
    ) -> None:
        """Waits for ``connection_made``.

        Args:
            opened: Called with the connection once it is open, after the handshake of TLS.
            closed: Called with it in the end.
            received: Size of the messages all connections of the server hold.
            begin: Called with each new call.
        """
        super().__init__()
        self.calls = ReceivedCalls(received, begin)
        """The calls."""
        self.calls.wake = self.wake
        self.calls.end = self.end
        self._opened = opened
        self._closed = closed
        self._idle_checks = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements asyncio.Protocol."""
        host, port = (transport.get_extra_info("peername") or ("", 0))[:2]  # It may have left already.
        host = host.removeprefix(_MAPPED)
        self.calls.peer = f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"
        certificate = transport.get_extra_info("peercert") or {}
        self.calls.names = tuple(name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS")
        super().connection_made(transport)
        self._opened(self)

    def end(self, error: Exception) -> None:
        """Ends all calls, and closes the connection."""
        self._closed(self)
        self.calls.is_over = True
        if self._check is not None:
            self._check.cancel()
        for call in list(self.calls.calls.values()):
            call.cancelled()
        if isinstance(error, Http2Violation):
            self.calls.drain()
        self._close(self.calls.take)

    def _receive(self, data: bytes) -> None:
        if not self.calls.is_over:
            try:
                self.calls.receive(data)
            except Http2Violation as violation:
                self.end(violation)
            except Exception as error:
                log.exception("connection.failed", peer=self.calls.peer)
                self.end(error)

    def _flush(self) -> None:
        self._woken = False
        transport = self._transport
        # uvloop raises if a connection that is lost is written to. A write may lose it.
        while transport is not None and not (self._writing_paused or transport.is_closing()):
            if not (data := self.calls.take()):
                return
            transport.write(data)

    def _ping(self) -> None:
        self.calls.ping()

    def _check_heard(self) -> None:
        self._idle_checks = 0 if self.calls.calls else self._idle_checks + 1
        if not self.calls.has_begun or self._idle_checks > _MOST_IDLE_CHECKS:
            self.calls.drain()
            self.end(ConnectionLost("it is idle"))
            return
        super()._check_heard()
