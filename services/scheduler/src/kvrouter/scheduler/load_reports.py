"""What the ranks of one component say of their own load."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError
from kvrouter.core import Rank
from kvrouter.v1.events_pb2 import LoadReport


class LoadReports:
    """The newest report of each registered rank. A rank that falls silent is judged by what is booked on it alone."""

    def __init__(self, max_age_seconds: float) -> None:
        """``max_age_seconds`` is how long a report counts, from when it came."""
        self._max_age = max_age_seconds
        self._reports: dict[Rank, tuple[LoadReport, float]] = {}
        self._registered: dict[Rank, int] = {}

    def set_ranks(self, registered: Iterable[tuple[Rank, int]]) -> None:
        """The ranks that are registered, with their incarnations."""
        self._registered = dict(registered)
        self._reports = {rank: entry for rank, entry in self._reports.items() if self._is_current(rank, entry[0])}

    def take(self, encoded: bytes, now: float) -> str:
        """Takes a report in as it came off the wire.

        Returns:
            Why it was set aside: ``unparsable``, ``unknown_rank``, ``old``; empty if it counts.
        """
        try:
            report = LoadReport.FromString(encoded)
        except DecodeError:
            return "unparsable"
        rank = (report.rank.worker_id, report.rank.dp_rank)
        if rank not in self._registered:
            return "unknown_rank"
        before = self._reports.get(rank)
        if not self._is_current(rank, report) or (before is not None and self._order(report) < self._order(before[0])):
            return "old"
        self._reports[rank] = (report, now)
        return ""

    def of(self, rank: Rank, now: float) -> LoadReport | None:
        """The rank's newest report, if it came within the age that counts."""
        entry = self._reports.get(rank)
        return entry[0] if entry is not None and now - entry[1] <= self._max_age else None

    def _is_current(self, rank: Rank, report: LoadReport) -> bool:
        incarnation = self._registered.get(rank)
        return incarnation is not None and report.incarnation >= incarnation

    @staticmethod
    def _order(report: LoadReport) -> tuple[int, int]:
        return (report.incarnation, report.measured_unix_ns)
