"""NATS connections made again when they are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
from kvrouter.net.logs import get_logger
from kvrouter.net.nats.access import NatsAccess
from kvrouter.net.nats.client import TolerantClient

log = get_logger(__name__)

_MAX_OUTGOING_BYTES = 8 << 20
"""Bytes queued for sending while NATS is away; publishing more fails at once."""
_CONNECT_SECONDS = 2
_RECONNECT_WAIT_SECONDS: Any = 0.5  # declared as int by the library, which passes it to asyncio.sleep
_PING_SECONDS = 5
_MAX_PINGS_OUTSTANDING = 2
"""With the interval above: a vanished server is noticed within 15 s."""


class NatsObserver:
    """Learns of changes and errors of a connection. Does nothing by itself."""

    def on_connected(self) -> None:
        """The connection is up."""

    def on_disconnected(self, *, lost: bool) -> None:
        """The connection is down: ``lost``, or not open yet or closed by this process."""

    def on_error(self, error: Exception) -> bool:  # noqa: ARG002
        """Returns whether an error needs no log entry."""
        return False


@asynccontextmanager
async def connect_nats(
    target: str | NatsAccess, name: str, observer: NatsObserver | None = None
) -> AsyncIterator[TolerantClient]:
    """Connects to NATS while the context lasts. Waits for NATS as long as necessary, and reconnects.

    The library gives a connection up only after a refusal: ``TolerantClient.wait_closed``.

    Args:
        target: URLs of servers, separated by commas, or with identity and certificates.
        name: Name of the connection in NATS' own monitoring.
        observer: Learns of changes and errors.

    Raises:
        nats.errors.Error: a URL is malformed.
    """
    access = NatsAccess.of(target)
    url = str(access)
    observer = NatsObserver() if observer is None else observer
    reported = ""
    leaving = False

    async def on_error(error: Exception) -> None:
        nonlocal reported
        if observer.on_error(error):
            return
        if isinstance(error, nats.errors.SlowConsumerError):
            log.warning("nats.subscription_full", subject=error.subject)
            return
        text = str(error) or type(error).__name__
        # The library reports the same error for each attempt to reconnect.
        if text != reported:
            reported = text
            log.warning("nats.error", url=url, error=text)

    async def on_disconnected() -> None:
        if not leaving:
            observer.on_disconnected(lost=True)
            log.warning("nats.disconnected", url=url)

    async def on_reconnected() -> None:
        nonlocal reported
        reported = ""
        observer.on_connected()
        log.info("nats.reconnected", url=url)

    observer.on_disconnected(lost=False)
    client = TolerantClient(access)
    try:
        await client.connect(
            access.servers,
            name=name,
            error_cb=on_error,
            disconnected_cb=on_disconnected,
            reconnected_cb=on_reconnected,
            closed_cb=client.on_closed,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RECONNECT_WAIT_SECONDS,
            connect_timeout=_CONNECT_SECONDS,
            ping_interval=_PING_SECONDS,
            max_outstanding_pings=_MAX_PINGS_OUTSTANDING,
            pending_size=_MAX_OUTGOING_BYTES,
            **access.options(),
        )
        observer.on_connected()
        log.info("nats.connected", url=url)
        yield client
    finally:
        leaving = True
        observer.on_disconnected(lost=False)
        await client.close()
