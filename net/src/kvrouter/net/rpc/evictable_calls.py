"""Bounds the calls that a gRPC server serves to everybody. A further call ends the oldest one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

MAX_CALLS = 256
"""Default of the maximum number of such calls."""


class EvictableCalls:
    """Calls that may end at any time, since their clients have shown no credential."""

    def __init__(self, limit: int = MAX_CALLS) -> None:
        self.limit = limit
        self.evicted = 0
        """Number of calls that were ended because a further one came."""
        self._timeouts: dict[asyncio.Timeout, None] = {}

    def __len__(self) -> int:
        """Returns the number of running calls."""
        return len(self._timeouts)

    @contextmanager
    def running(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Counts a call while the context lasts. ``timeout``, in which the call runs, ends when the call is evicted."""
        if len(self._timeouts) >= self.limit:
            oldest = next(iter(self._timeouts))
            del self._timeouts[oldest]
            self.evicted += 1
            oldest.reschedule(0.0)
        self._timeouts[timeout] = None
        try:
            yield
        finally:
            self._timeouts.pop(timeout, None)
