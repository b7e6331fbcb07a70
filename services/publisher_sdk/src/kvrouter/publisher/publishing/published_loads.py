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

    def is_news(self, report: LoadReport, now: float) -> bool:
        """Returns whether a report says anything new, or Schedulers would soon forget the last one.

        ``now``: seconds of a monotonic clock.
        """
        last, due = self._published.get(report.rank.dp_rank, (report, now))
        if now >= due:
            return True
        last.measured_unix_ns, last.sequence = report.measured_unix_ns, report.sequence
        return last != report

    def published(self, report: LoadReport, now: float) -> None:
        """Records a published report. ``now``: seconds of the same clock."""
        due = now + SAME_LOAD_SECONDS * self._rng.uniform(_JITTER, 1.0)
        self._published[report.rank.dp_rank] = report, due
