"""What the ranks of one component say of their own load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from kvrouter.core import Rank
from kvrouter.net.decoding import Undecodable, decode_message
from kvrouter.scheduler.identifiers import rank_of
from kvrouter.scheduler.policies.interface import Column
from kvrouter.v1.events_pb2 import LoadReport
from numpy.typing import NDArray

_LARGEST = (1 << 63) - 1
_REORDER_SECONDS = 2.0
"""How long a report can be outrun by later ones. Beyond that, an order that says otherwise is wrong: a clock was set
back, a publisher started again, or a number was forged."""


class Reported(NamedTuple):
    """Columns, entry i of each speaking of the i-th registered rank; 0 where it has said nothing of late."""

    shares: NDArray[np.float64]
    """Share of its blocks that is active; 0 where their number is unknown."""
    prefill_tokens: Column


class LoadReports:
    """The newest report of each registered rank. A rank that falls silent is judged by what is booked on it alone."""

    def __init__(self, max_age_seconds: float) -> None:
        """``max_age_seconds`` is how long a report counts, from when it came."""
        self._max_age = max_age_seconds
        self._reports: dict[Rank, tuple[LoadReport, float]] = {}
        self._registered: dict[Rank, int] = {}
        self._places: dict[Rank, int] = {}
        self._shares = np.zeros(0)
        self._prefill_tokens: Column = np.zeros(0, np.int64)
        self._heard = np.zeros(0)

    def set_ranks(self, registered: Iterable[tuple[Rank, int]]) -> None:
        """The ranks that are registered, with their incarnations, in the order of the columns."""
        self._registered = dict(registered)
        self._places = {rank: place for place, rank in enumerate(self._registered)}
        self._reports = {rank: entry for rank, entry in self._reports.items() if self._is_current(rank, entry[0])}
        count = len(self._places)
        self._shares, self._prefill_tokens = np.zeros(count), np.zeros(count, np.int64)
        self._heard = np.full(count, -np.inf)
        for rank, (report, came) in self._reports.items():
            self._show(rank, report, came)

    def take(self, encoded: bytes, now: float) -> str:
        """Takes a report in as it came off the wire.

        Returns:
            Why it was quarantined: ``unparsable``, ``unknown_rank``, ``old``; empty if it counts.
        """
        try:
            report = decode_message(LoadReport, encoded)
        except Undecodable:
            return "unparsable"
        rank = rank_of(report)
        if rank not in self._registered:
            return "unknown_rank"
        before = self._reports.get(rank)
        if not self._is_current(rank, report) or (before is not None and self._is_outrun(report, *before, now)):
            return "old"
        self._reports[rank] = (report, now)
        self._show(rank, report, now)
        return ""

    def of(self, rank: Rank, now: float) -> LoadReport | None:
        """The rank's newest report, if it came within the age that counts."""
        entry = self._reports.get(rank)
        return entry[0] if entry is not None and now - entry[1] <= self._max_age else None

    def age_seconds(self, rank: Rank, now: float) -> float | None:
        """Returns the age of the rank's newest report, also where it counts no longer; None where none came."""
        entry = self._reports.get(rank)
        return None if entry is None else max(0.0, now - entry[1])

    def columns(self, now: float) -> Reported:
        """The same of every registered rank."""
        counts = now - self._heard <= self._max_age
        return Reported(self._shares * counts, self._prefill_tokens * counts)

    def _show(self, rank: Rank, report: LoadReport, came: float) -> None:
        place = self._places[rank]
        self._shares[place] = report.active_blocks / report.total_blocks if report.total_blocks else 0.0
        self._prefill_tokens[place] = min(report.prefill_tokens, _LARGEST)
        self._heard[place] = came

    def _is_current(self, rank: Rank, report: LoadReport) -> bool:
        incarnation = self._registered.get(rank)
        return incarnation is not None and report.incarnation >= incarnation

    def _is_outrun(self, report: LoadReport, before: LoadReport, came: float, now: float) -> bool:
        """Whether a report says less than the one before it, which came at ``came``.

        Of different incarnations the registered one counts; another one counts only where that has fallen silent. In
        one incarnation the later report counts, by its sequence where it has one, since clocks can be set back.
        """
        if report.incarnation != before.incarnation:
            registered = self._registered.get(rank_of(report))
            return registered == before.incarnation and now - came <= self._max_age
        if report.sequence and before.sequence:
            is_earlier = report.sequence < before.sequence
        else:
            is_earlier = report.measured_unix_ns < before.measured_unix_ns
        return is_earlier and now - came <= _REORDER_SECONDS
