"""Bounds of call streams: sizes, the silence of a peer, and unread responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

VERSION = 1
"""Version of the protocol."""
SPARSE_PINGS = "sparse-pings"
"""Capability: pings that probe the server at any pace, and do not oblige the client to send more."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of a process on a call stream."""

    message_bytes: int = 256 << 10
    """Maximum size of a message, in either direction."""
    part_bytes: int = 64 << 10
    """Requests and responses longer than this travel in parts of this size."""
    calls: int = 16_384
    """Maximum number of running calls on a stream at once."""
    request_bytes: int = 64 << 20
    """Maximum size of a request, as over an ordinary RPC."""
    response_bytes: int = 64 << 20
    """Maximum size of a response, as over an ordinary RPC."""
    parted_bytes: int = 128 << 20
    """Size of all partial responses of a stream. The call of a further part fails."""
    queued_bytes: int = 128 << 20
    """Maximum size of all waiting requests for the stream. One more is not sent."""
    unread_call_bytes: int = 4 << 20
    """Size of a call's unread responses at which it may add no further one: the call ends instead."""
    unread_stream_bytes: int = 64 << 20
    """Size of a stream's unread responses at which it may add no further one: the stream ends instead."""
    connection_streams: int = 16
    """Maximum number of streams a server serves on one connection."""
    server_streams: int = 4_096
    """Maximum number of streams a server serves. A further one replaces the one longest without a call."""
    server_calls: int = 65_536
    """Maximum number of running calls on all streams of a server."""
    server_unfinished_bytes: int = 256 << 20
    """Maximum size of the requests of which a server has received only parts, on all streams."""
    server_unread_bytes: int = 512 << 20
    """Size of a server's unread responses on all streams at which the next one ends its stream."""


ITEM_BYTES = 64
"""Upper bound of the bytes an item takes in a message beside its request or response, trace context and failure."""


@dataclass(slots=True)
class CallStreamCounts:
    """Totals over all streams of one side. Plain numbers, because they change with every message."""

    streams: int = 0
    """Open streams."""
    opened: int = 0
    """Streams opened."""
    ended: Counter[str] = field(default_factory=Counter)
    """Ended streams, by reason: ``closed``, ``lost``, ``silent``, ``draining``, ``unread``, ``idle``,
    ``replaced``, ``credential``, ``failed`` by a defect, or a violation."""
    messages_sent: int = 0
    messages_received: int = 0
    items_sent: int = 0
    """Requests or responses sent, parts counted one by one. Divided by ``messages_sent``: the mean size of a batch."""
    items_received: int = 0
    calls: int = 0
    """Calls started."""
    running: int = 0
    """Running calls."""
    unfinished_bytes: int = 0
    """Size of the requests of which only parts have arrived."""
    unread_bytes: int = 0
    """Size of the waiting responses to be sent."""
    failed: Counter[str] = field(default_factory=Counter)
    """Failed calls, by outcome: a gRPC status code, ``not_sent``, ``unknown`` or ``timed_out``."""


MISSES = 4
"""Intervals without any message after which a peer is silent."""


class HeartbeatMonitor:
    """Counts consecutive intervals without a message from a peer.

    It counts intervals of this process's event loop instead of seconds, so a frozen process does not
    blame its peer: after a freeze of any length only one interval has passed, and the messages of the meantime
    are read before the next interval ends.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._heard = True

    @property
    def silent(self) -> bool:
        """Whether no message has arrived for ``MISSES`` intervals."""
        return self._missed >= MISSES

    def heard(self) -> None:
        """Records a message from the peer."""
        self._heard, self._missed = True, 0

    def tick(self) -> None:
        """Ends an interval."""
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False


MAX_UNREAD_BYTES = 4 << 20
"""Memory of unread responses at which a call ends: some forty thousand outputs of one token."""
_RESPONSE_BYTES = 64
"""Memory of a response besides its content."""


class BufferFull(Exception):
    """The client has left more unread than the buffer holds."""

    def __init__(self, unread_bytes: int) -> None:
        super().__init__(f"{unread_bytes} bytes are unread; the limit is {MAX_UNREAD_BYTES}")
        self.unread_bytes = unread_bytes


class ResponseBuffer:
    """Responses for one task. Appending never waits."""

    def __init__(self) -> None:
        self._responses: list[bytes] = []
        self._unread_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        """Set while the task waits. Less work than an Event, for each token of an ordinary call."""
        self._ended = False

    def append(self, encoded: bytes) -> None:
        """Adds a response.

        Raises:
            BufferFull: too much is unread. All of it is dropped.
        """
        self._unread_bytes += len(encoded) + _RESPONSE_BYTES
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self._responses.clear()
            raise BufferFull(self._unread_bytes)
        self._responses.append(encoded)
        self._wake()

    def end(self) -> None:
        """Ends the responses."""
        self._ended = True
        self._wake()

    async def take(self) -> list[bytes]:
        """Waits for responses and returns them; an empty list at the end."""
        if not self._responses and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._responses, self._unread_bytes = self._responses, [], 0
        return taken

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # its task may have been cancelled
            waiter.set_result(None)
