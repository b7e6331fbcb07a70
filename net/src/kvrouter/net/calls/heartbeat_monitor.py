"""Decides whether a peer still answers heartbeats. It counts intervals and answers, and reads no clock."""

from __future__ import annotations

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
