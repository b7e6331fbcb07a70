"""NATS connections that reconnect forever, with metrics of their failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
import structlog
from kvrouter.net.nats_access import NatsAccess
from kvrouter.net.nats_client import TolerantClient
from nats.aio.client import Client
from prometheus_client import CollectorRegistry, Counter, Gauge

log = structlog.get_logger(component="nats")

MAX_PENDING_MESSAGES = 65_536
"""Messages that a subscription queues for its reader; further ones are dropped and counted."""
MAX_PENDING_BYTES = 64 << 20
"""Bytes that a subscription queues for its reader."""
_MAX_OUTGOING_BYTES = 8 << 20
"""Bytes that are queued for sending while NATS is away; publishing more fails at once."""
_RECONNECT_WAIT_SECONDS: Any = 0.5  # declared as int by the library, which passes it to asyncio.sleep
_PING_SECONDS = 5
_MAX_PINGS_OUTSTANDING = 2


class NatsMetrics:
    """Metrics of the NATS connections of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.connected = Gauge(
            "kvrouter_nats_connected",
            "1 while NATS is connected, 0 while it should be, NaN where it is not used.",
            registry=registry,
        )
        self.connected.set(math.nan)
        self.disconnects = Counter("kvrouter_nats_disconnects", "Lost connections.", registry=registry)
        self.slow_consumers = Counter(
            "kvrouter_nats_slow_consumers", "Messages dropped because a subscription was full.", registry=registry
        )
        self.errors = Counter("kvrouter_nats_errors", "Other errors of NATS connections.", registry=registry)


@asynccontextmanager
async def connect_nats(target: str | NatsAccess, name: str, metrics: NatsMetrics) -> AsyncIterator[Client]:
    """Connects to NATS while the context lasts. Waits for NATS as long as necessary, and reconnects forever.

    Args:
        target: URLs of servers, separated by commas, or with identity and certificates.
        name: Name of the connection in NATS' own monitoring.
        metrics: Metrics to update.
    """
    access = NatsAccess.of(target)
    url = str(access)
    reported = ""
    leaving = False

    async def on_error(error: Exception) -> None:
        nonlocal reported
        if isinstance(error, nats.errors.SlowConsumerError):
            metrics.slow_consumers.inc()
            log.warning("nats.subscription_full", subject=error.subject)
            return
        metrics.errors.inc()
        # The library reports the same error for each attempt to reconnect.
        if str(error) != reported:
            reported = str(error)
            log.warning("nats.error", error=reported or type(error).__name__)

    async def on_disconnect() -> None:
        if leaving:
            return
        metrics.connected.set(0)
        metrics.disconnects.inc()
        log.warning("nats.disconnected", url=url)

    async def on_reconnect() -> None:
        nonlocal reported
        reported = ""
        metrics.connected.set(1)
        log.info("nats.reconnected", url=url)

    metrics.connected.set(0)
    client = TolerantClient(access)
    await client.connect(
        access.servers,
        name=name,
        error_cb=on_error,
        disconnected_cb=on_disconnect,
        reconnected_cb=on_reconnect,
        allow_reconnect=True,
        max_reconnect_attempts=-1,
        reconnect_time_wait=_RECONNECT_WAIT_SECONDS,
        connect_timeout=2,
        # Detects within 15 s a server that vanished without closing.
        ping_interval=_PING_SECONDS,
        max_outstanding_pings=_MAX_PINGS_OUTSTANDING,
        pending_size=_MAX_OUTGOING_BYTES,
        **access.options(),
    )
    try:
        # The library may swallow a cancellation while it connects; the task would then never end.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        metrics.connected.set(1)
        log.info("nats.connected", url=url)
        yield client
    finally:
        leaving = True
        metrics.connected.set(0)
        await client.close()
