"""Decides whether a peer still answers heartbeats. Pure: it counts intervals and answers, and reads no clock."""

from __future__ import annotations

MISSES = 4
"""Intervals without an answer after which a peer counts as silent."""


class HeartbeatMonitor:
    """Counts the intervals in a row in which nothing came from a peer.

    Counting intervals of the own event loop, not seconds, keeps a process that was frozen itself from blaming its peer:
    after a freeze of any length one interval has passed, and the answers are read before the next ends.
    """

    def __init__(self) -> None:
        self._missed = 0
        self._heard = True

    @property
    def silent(self) -> bool:
        """Whether the peer has answered nothing for ``MISSES`` intervals."""
        return self._missed >= MISSES

    def heard(self) -> None:
        """Notes a message from the peer."""
        self._heard, self._missed = True, 0

    def tick(self) -> None:
        """Ends an interval."""
        self._missed = 0 if self._heard else self._missed + 1
        self._heard = False
