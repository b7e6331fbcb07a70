"""The I/O of either side of a connection: reads in turns, writes ready bytes together, notices silence."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, cast

from kvrouter.net.budgets import loop_budget
from kvrouter.net.http2.options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS
from kvrouter.net.ticks import seconds_to_send

_CHECK_SECONDS = KEEPALIVE_TIMEOUT_MS / 1000
_CHECKS_TO_PING = KEEPALIVE_MS // KEEPALIVE_TIMEOUT_MS
_READ_US = 20
"""CPU time of a small read, microseconds."""


class ConnectionLost(Exception):
    """The connection could not be made, or it or its call has ended."""

    def __init__(self, cause: str, *, never_processed: bool = False) -> None:
        """``never_processed``: the server said so of the call."""
        super().__init__(cause)
        self.never_processed = never_processed


class Endpoint(asyncio.Protocol):
    """One end of a connection. Subclasses know the protocol."""

    bytes_per_us: ClassVar[int] = 4
    """Bytes processed in a microsecond, by default outputs of an engine's step."""
    slice_bytes: ClassVar[int] = 16 << 10
    """Bytes processed in one turn."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._budget = loop_budget()
        self._unread: deque[bytes] = deque()
        """Input in wait for its turn. No more is read meanwhile."""
        self._lost: Exception | None = None
        """Cause of the loss of the connection, reported after the input."""
        self._transport: asyncio.Transport | None = None
        self._writing_paused = False
        self._woken = False
        self._is_receiving = False
        self._heard = True
        self._silent_checks = 0
        self._check: asyncio.TimerHandle | None = None

    @abstractmethod
    def end(self, error: Exception) -> None:
        """Ends everything on the connection with an error, unless it has ended."""

    @abstractmethod
    def _receive(self, data: bytes) -> None:
        """Processes a part of the input."""

    @abstractmethod
    def _flush(self) -> None:
        """Writes the ready bytes. ``_woken`` must become False."""

    @abstractmethod
    def _ping(self) -> None:
        """Asks the peer for an answer."""

    def wake(self) -> None:
        """Writes the ready bytes after the ready callbacks, or what is being read, so they share a write."""
        if not self._woken:
            self._woken = True
            if not self._is_receiving:
                self._loop.call_soon(self._flush)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implements asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connected: socket.socket = transport.get_extra_info("socket")
            # A peer that vanished acknowledges nothing. TCP alone would wait a quarter of an hour.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_TIMEOUT_MS)
        self._check_later()
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Implements asyncio.Protocol."""
        self._lost = ConnectionLost(f"UNAVAILABLE: the connection was lost: {exc or 'closed by the peer'}")
        if not self._unread:
            self.end(self._lost)

    def pause_writing(self) -> None:
        """Implements asyncio.Protocol."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """Implements asyncio.Protocol."""
        self._writing_paused = False
        self.wake()

    def data_received(self, data: bytes) -> None:
        """Implements asyncio.Protocol."""
        self._heard = True
        if len(data) <= self.slice_bytes and not self._unread and self._budget.take(self._cost_us(data)):
            self._process(data)
            return
        if not self._unread and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        is_waiting = bool(self._unread)
        size = self.slice_bytes
        self._unread.extend(data[start : start + size] for start in range(0, len(data), size))
        if not is_waiting:
            self._await_turn()

    def _process(self, data: bytes) -> None:
        """Processes a part of the input, and writes the answers to it that are ready."""
        self._is_receiving = not self._woken  # Otherwise a flush is scheduled.
        try:
            self._receive(data)
        finally:
            if self._is_receiving:
                self._is_receiving = False
                if self._woken:
                    self._flush()

    def _receive_waiting(self) -> None:
        """Processes the next slice of the input."""
        self._process(self._unread.popleft())
        if self._unread:
            self._await_turn()
        elif self._lost is not None:
            self.end(self._lost)
        elif self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def _await_turn(self) -> None:
        self._budget.call(self._cost_us(self._unread[0]), self._receive_waiting)

    def _cost_us(self, data: bytes) -> int:
        return _READ_US + len(data) // self.bytes_per_us

    def _close(self, last_bytes: Callable[[], bytes]) -> None:
        """Writes the last bytes and closes the connection, unless it is closed."""
        transport, self._transport = self._transport, None
        if transport is None or transport.is_closing():
            return
        transport.write(last_bytes())
        if transport.get_write_buffer_size():
            # The peer does not read, so the rest would wait for good.
            transport.abort()
        else:
            transport.close()

    def _check_heard(self) -> None:
        """Detects a vanished peer, as gRPC's keepalive does."""
        # Input in wait for its turn may hold the answer to a ping.
        self._silent_checks = 0 if self._heard or self._unread else self._silent_checks + 1
        self._heard = False
        if self._silent_checks > _CHECKS_TO_PING:
            self.end(ConnectionLost("UNAVAILABLE: the peer does not answer pings"))
            return
        if self._silent_checks == _CHECKS_TO_PING:
            self._ping()
            self.wake()
        self._check_later()

    def _check_later(self) -> None:
        self._check = self._loop.call_later(seconds_to_send(_CHECK_SECONDS), self._check_heard)
