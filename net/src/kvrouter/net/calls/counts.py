"""What the call streams of a process count, for metrics and tests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallStreamCounts:
    """Totals over all streams of one side. Plain numbers, because they change with every message."""

    streams: int = 0
    """Open streams."""
    opened: int = 0
    """Streams that were opened."""
    ended: Counter[str] = field(default_factory=Counter)
    """Streams that ended, by reason: ``closed``, ``lost``, ``silent``, ``draining``, ``unread``, ``idle``,
    ``replaced``, ``credential``, ``failed`` by a defect, or a violation."""
    messages_sent: int = 0
    messages_received: int = 0
    items_sent: int = 0
    """Requests or responses sent, parts counted one by one. Divided by ``messages_sent``: the mean size of a batch."""
    items_received: int = 0
    calls: int = 0
    """Calls that were started."""
    running: int = 0
    """Calls that run."""
    unfinished_bytes: int = 0
    """Size of the requests of which only parts have arrived."""
    unread_bytes: int = 0
    """Size of the responses that wait to be sent."""
    failed: Counter[str] = field(default_factory=Counter)
    """Calls that failed, by outcome: a gRPC status code, ``not_sent``, ``unknown`` or ``timed_out``."""
