"""Load reported by ranks. While NATS is away, booked load alone counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from kvrouter.core import Rank
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.net.local.messages import LiveMessages, Message, Receiver, Subscribed
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.identifiers import rank_of
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.policies.interface import Column
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from numpy.typing import NDArray

log = structlog.get_logger(component="scheduler")

_LARGEST = (1 << 63) - 1
_EXPECTED = {
    "unparsable": "an encoded LoadReport",
    "invalid": "total_blocks and sequence of 1 or more, or unset, received 0",
}
"""What each subject must carry, by the reason for which a report of it was refused."""
_REORDER_SECONDS = 2.0
"""Longest time by which later reports can overtake one. A longer contradiction shows a wrong order: a clock
was set back, a publisher restarted, or a number was forged."""


class Reported(NamedTuple):
    """Reported load as columns in the order of the registered ranks; 0 without a recent report."""

    shares: NDArray[np.float64]
    """Active share of the blocks; 0 if their number is unknown."""
    prefill_tokens: Column


class _Arrived(msgspec.Struct, frozen=True):
    report: LoadReport
    at: float
    """Time of its arrival, seconds."""
    others: int
    """Requests in it beyond those booked."""


class LoadReports:
    """The newest report of each registered rank. A rank without a recent report is judged by booked load alone."""

    def __init__(self, max_age_seconds: float, most_booked: Callable[[Rank], int] = lambda _: 0) -> None:
        """Starts without reports.

        Args:
            max_age_seconds: How long a report counts after its arrival.
            most_booked: Returns how many requests of an arriving report may be booked here.
        """
        self._max_age = max_age_seconds
        self._most_booked = most_booked
        self._reports: dict[Rank, _Arrived] = {}
        self._registered: dict[Rank, int] = {}
        self._places: dict[Rank, int] = {}
        self._shares = np.zeros(0)
        self._prefill_tokens: Column = np.zeros(0, np.int64)
        self._others: Column = np.zeros(0, np.int64)
        self._has_others = False
        self._heard = np.zeros(0)

    def set_ranks(self, registered: Iterable[tuple[Rank, int]]) -> None:
        """Replaces the registered ranks and their incarnations, in the order of the columns."""
        self._registered = dict(registered)
        self._places = {rank: place for place, rank in enumerate(self._registered)}
        self._reports = {
            rank: entry
            for rank, entry in self._reports.items()
            if rank in self._registered and entry.report.incarnation >= self._registered[rank]
        }
        count = len(self._places)
        self._shares, self._prefill_tokens = np.zeros(count), np.zeros(count, np.int64)
        self._others = np.zeros(count, np.int64)
        self._has_others = False
        self._heard = np.full(count, -np.inf)
        for rank, arrived in self._reports.items():
            self._show(rank, arrived)

    def take(self, encoded: bytes, now: float) -> str:
        """Applies an encoded report.

        Returns:
            Why it was quarantined: ``unparsable``, ``invalid``, ``unknown_rank`` or ``old``; empty if it counts.
        """
        try:
            report = decode_message(LoadReport, encoded)
        except Undecodable:
            return "unparsable"
        if (not report.total_blocks and "total_blocks" in report) or (not report.sequence and "sequence" in report):
            return "invalid"
        rank = rank_of(report)
        registered = self._registered.get(rank)
        if registered is None:
            return "unknown_rank"
        before = self._reports.get(rank)
        if report.incarnation < registered or (before is not None and self._is_outrun(report, before, now)):
            return "old"
        others = max(0, report.running_requests + report.waiting_requests - self._most_booked(rank))
        self._reports[rank] = arrived = _Arrived(report, now, others)
        self._show(rank, arrived)
        return ""

    def of(self, rank: Rank, now: float) -> LoadReport | None:
        """Returns the rank's newest report; None if it is too old to count."""
        entry = self._reports.get(rank)
        return entry.report if entry is not None and now - entry.at <= self._max_age else None

    def age_seconds(self, rank: Rank, now: float) -> float | None:
        """Returns the age in seconds of the rank's newest report, even if it no longer counts; None without one."""
        entry = self._reports.get(rank)
        return None if entry is None else max(0.0, now - entry.at)

    def columns(self, now: float) -> Reported:
        """Returns the reported load of every registered rank."""
        counts = now - self._heard <= self._max_age
        return Reported(self._shares * counts, self._prefill_tokens * counts)

    def others(self, now: float) -> Column | None:
        """Returns the reported requests of every registered rank beyond those booked; None if there are none."""
        if not self._has_others:
            return None
        others: Column = self._others * (now - self._heard <= self._max_age)
        return others

    def _show(self, rank: Rank, arrived: _Arrived) -> None:
        place, report = self._places[rank], arrived.report
        self._shares[place] = report.active_blocks / report.total_blocks if report.total_blocks else 0.0
        self._prefill_tokens[place] = min(report.prefill_tokens, _LARGEST)
        if arrived.others != self._others[place]:
            self._others[place] = arrived.others
            self._has_others = bool(self._others.any())
        self._heard[place] = arrived.at

    def _is_outrun(self, report: LoadReport, arrived: _Arrived, now: float) -> bool:
        """Returns whether a report is older than an arrived one.

        Of different incarnations the registered one counts; another one counts only after it has fallen silent.
        Within an incarnation the sequence decides where both reports have one, because clocks can be set back.
        """
        before, arrived_at = arrived.report, arrived.at
        if report.incarnation != before.incarnation:
            registered = self._registered.get(rank_of(report))
            return registered == before.incarnation and now - arrived_at <= self._max_age
        if "sequence" in report and "sequence" in before:
            is_earlier = report.sequence < before.sequence
        else:
            is_earlier = report.measured_unix_ns < before.measured_unix_ns
        return is_earlier and now - arrived_at <= _REORDER_SECONDS


@dataclass(eq=False)
class LoadListener:
    """Subscribes to the load reports of every component. ``run`` must be running.

    ``connect`` returns the connection once NATS is reachable; ``reports_of`` the reports of a component.
    """

    connect: Callable[[], Awaitable[LiveMessages]]
    directory: Directory
    reports_of: Callable[[ComponentName], LoadReports | None]
    metrics: SchedulerMetrics
    clock: Callable[[], float]
    quarantine: Quarantine = field(default_factory=Quarantine)
    _subscriptions: dict[ComponentName, Subscribed] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Follows the components until cancelled."""
        client = await self.connect()
        async for directory in self.directory.changes():
            for gone in self._subscriptions.keys() - directory.components.keys():
                await self._subscriptions.pop(gone).unsubscribe()
            for name in directory.components.keys() - self._subscriptions.keys():
                self._subscriptions[name] = await client.subscribe(name.load_wildcard, cb=self._taker(name))
                log.debug("load_report.subscribed", component_name=str(name))

    def take(self, name: ComponentName, encoded: bytes, subject: str = "") -> None:
        """Applies an encoded report of a component's rank; ``subject`` is the subject it arrived on."""
        reports = self.reports_of(name)
        refused = "unknown_component" if reports is None else reports.take(encoded, self.clock())
        if refused:
            self.metrics.reports_quarantined.labels(reason=refused).inc()
            log.debug("load_report.quarantined", reason=refused, component_name=str(name))
            if expected := _EXPECTED.get(refused):
                self.quarantine.reject("nats", subject, Undecodable(refused, f"expected {expected}"))

    def _taker(self, name: ComponentName) -> Receiver:
        async def take(message: Message) -> None:
            self.take(name, message.data, message.subject)

        return take
