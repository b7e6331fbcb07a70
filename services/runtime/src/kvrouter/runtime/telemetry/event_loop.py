"""Measures how late the event loop runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from kvrouter.runtime.telemetry.histogram import LoopHistogram
from prometheus_client import CollectorRegistry

PERIOD_S = 0.1
"""Interval between two measurements, seconds."""

_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


async def lateness() -> AsyncIterator[float]:
    """Yields every ``PERIOD_S`` how many seconds late a timer of the event loop was."""
    while True:
        due = time.monotonic() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        yield max(0.0, time.monotonic() - due)


class EventLoopMetrics:
    """The lateness of a process's event loop as a histogram."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._late = LoopHistogram(
            "kvrouter_event_loop_late_seconds",
            "Lateness of a timer of the event loop: the time that a new connection, a lease or a probe waits.",
            buckets=_BUCKETS,
            registry=registry,
        ).of()

    async def run(self) -> None:
        """Measures until cancelled."""
        async for seconds in lateness():
            self._late.observe(seconds)
