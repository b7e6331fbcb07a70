"""Encrypts the accepted connections of an HTTP port, a bounded number of handshakes at a time.

asyncio can encrypt the connections of a server itself, but bounds the time of a handshake only, and keeps a buffer of
256 KiB for each connection: a thousand clients that say nothing would take 256 MiB.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import suppress
from typing import cast

MAX_HANDSHAKES = 256
"""Handshakes of one port at a time; a further connection ends the oldest one."""
_BUFFER_BYTES = 16 << 10
"""Buffer of an encrypted connection: the largest record of TLS."""


class Handshakes:
    """The handshakes of one port."""

    def __init__(self, context: ssl.SSLContext, seconds: float) -> None:
        """``seconds`` is the longest time of a handshake."""
        self._context = context
        self._seconds = seconds
        self._running: dict[_Handshake, None] = {}
        """In the order in which they began."""
        self.ended = 0
        """Number of handshakes ended because a further connection came."""
        SSLProtocol.max_size = _BUFFER_BYTES

    def __len__(self) -> int:
        """Returns the number of handshakes under way."""
        return len(self._running)

    def encrypted(self, make: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Returns the protocol of an accepted connection; ``make`` that of the encrypted one, after its handshake."""
        return _Handshake(self, make)

    def close(self) -> None:
        """Ends all handshakes."""
        for handshake in list(self._running):
            handshake.abort()

    def begin(self, handshake: _Handshake) -> None:
        """Counts a handshake."""
        if len(self._running) >= MAX_HANDSHAKES:
            self.ended += 1
            next(iter(self._running)).abort()
        self._running[handshake] = None

    def end(self, handshake: _Handshake) -> None:
        """Counts a handshake no more."""
        self._running.pop(handshake, None)

    async def encrypt(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> asyncio.Transport:
        """Returns the encrypted transport.

        Raises:
            OSError: the handshake failed, or took too long.
        """
        loop = asyncio.get_running_loop()
        encrypted = await loop.start_tls(
            transport,
            protocol,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._seconds,
            ssl_shutdown_timeout=self._seconds,
        )
        return cast(asyncio.Transport, encrypted)


class _Handshake(asyncio.Protocol):
    """A connection until it is encrypted. The first data may come with the end of the handshake."""

    def __init__(self, handshakes: Handshakes, make: Callable[[], asyncio.Protocol]) -> None:
        self._handshakes = handshakes
        self._make = make
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._early = b""
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._handshakes.begin(self)
        self._task = asyncio.create_task(self._run(self._transport), name="tls-handshake")

    def data_received(self, data: bytes) -> None:
        self._early += data

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's name
        self._is_lost = True

    def abort(self) -> None:
        """Closes the connection at once."""
        self._handshakes.end(self)
        if self._transport is not None:
            self._transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def _run(self, transport: asyncio.Transport) -> None:
        try:
            with suppress(OSError):
                encrypted = await self._handshakes.encrypt(transport, self)
                if not (self._is_lost or encrypted.is_closing()):
                    self._pass_on(encrypted)
        finally:
            self._handshakes.end(self)

    def _pass_on(self, transport: asyncio.Transport) -> None:
        protocol = self._make()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._early:
            protocol.data_received(self._early)
