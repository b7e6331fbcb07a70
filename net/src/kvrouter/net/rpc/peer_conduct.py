"""Closes connections with floods of calls without a credential.

A refused call costs a server as much as an idle admitted one. Calls are served in the order in which they come, so a
flood of them would delay everybody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.http2.received_calls import ReceivedCalls
from kvrouter.net.http2.side import Flood
from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_CALLS_PER_SECOND = 10.0
"""Calls without a credential of one connection for good, each second: probes and tools make fewer."""
_BURST = 32.0
"""Calls without a credential of one connection at once."""
_FLOOD_BURST = 2.0
_FLOOD_CALLS_PER_SECOND = 0.2
"""The same while such calls of all connections are a flood: together, a thousand connections make fewer than the server
can refuse."""
_FLOOD_PER_SECOND = 500
"""Calls without a credential of all connections in a second to count as a flood."""
_GRACE_SECONDS = 0.2
"""Time in which an admitted call saves a connection. All that are to be closed meanwhile are closed together."""


class PeerConduct:
    """Counts calls by connection. One with an admitted call is never closed: it may carry many clients."""

    def __init__(self) -> None:
        self.closed = 0
        """Number of closed connections."""
        self._second = 0
        self._in_second = 0
        self._in_second_before = 0
        self._closing: set[ReceivedCalls] = set()
        """Connections to be closed, unless one makes an admitted call before."""

    def opened(self, call: ReceivedCall, admitted: bool) -> None:
        """Records an attempt to open a call stream."""
        if admitted:
            self.admitted(call)
        else:
            self.without_credential(call)

    def admitted(self, call: ReceivedCall) -> None:
        """Records an admitted call."""
        call.connection.is_admitted = True

    def without_credential(self, call: ReceivedCall) -> bool:
        """Records a call without a valid credential. Too many of them end its connection.

        Returns whether it is about to be closed.
        """
        connection = call.connection
        if connection.is_admitted:
            return False
        now = time.monotonic()
        self._count(int(now))
        is_flood = max(self._in_second, self._in_second_before) > _FLOOD_PER_SECOND
        burst, rate = (_FLOOD_BURST, _FLOOD_CALLS_PER_SECOND) if is_flood else (_BURST, _CALLS_PER_SECOND)
        left, then = connection.allowance or (burst, now)
        left = min(burst, left + (now - then) * rate) - 1
        connection.allowance = left, now
        if left >= 0:
            return False
        if not self._closing:
            asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._close)
        self._closing.add(connection)
        return True

    def _count(self, second: int) -> None:
        if second != self._second:
            self._in_second_before = self._in_second if second == self._second + 1 else 0
            self._second, self._in_second = second, 0
        self._in_second += 1

    def _close(self) -> None:
        closing = [each for each in self._closing if not (each.is_admitted or each.is_over)]
        self._closing.clear()
        if not closing:
            return
        self.closed += len(closing)
        cause = "too many calls refused"
        log.warning("connections.closed", connections=len(closing), peer=closing[0].peer, cause=cause)
        for connection in closing:
            connection.end(Flood(cause))


class EvictableCalls:
    """Calls without a credential, which may be ended at any time."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.evicted = 0
        """Number of calls ended because a further one came."""
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
