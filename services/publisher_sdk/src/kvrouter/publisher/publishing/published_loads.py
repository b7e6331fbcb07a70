"""Decides which load reports are worth publishing. No I/O."""

from __future__ import annotations

import random

from kvrouter.v1.events_pb2 import LoadReport

SAME_LOAD_SECONDS = 7.0
"""Longest time before an unchanged load is published again. A Scheduler counts a report for 10 s by default."""
_JITTER = 0.8


class PublishedLoads:
    """The published load of each rank."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._published: dict[int, tuple[LoadReport, float]] = {}

    def is_news(self, dp_rank: int, load: LoadReport, now: float) -> bool:
        """Returns whether a rank's load is new, or Schedulers would soon forget the last one.

        ``now``: seconds of a monotonic clock.
        """
        last, due = self._published.get(dp_rank, (load, now))
        return now >= due or last != load

    def published(self, dp_rank: int, load: LoadReport, now: float) -> None:
        """Records a published load, which may not change afterwards. ``now``: seconds of the same clock."""
        self._published[dp_rank] = load, now + SAME_LOAD_SECONDS * self._rng.uniform(_JITTER, 1.0)
