"""Gives all selections with the same booking key the same outcome.

A client repeats a selection when it does not know whether the first one succeeded, at this Scheduler or another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvrouter.runtime.errors import RequestIdReused
from kvrouter.scheduler.bookings.leases import BookingFreed, BookingLeases
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse


class RepeatedSelections:
    """Finds the outcome of an earlier selection with the same key, or waits for one that is running."""

    def __init__(
        self,
        booking_table: BookingTable,
        booking_leases: BookingLeases,
        metrics: SchedulerMetrics,
        clock: Callable[[], float],
    ) -> None:
        """``clock`` returns the seconds of a monotonic clock."""
        self._booking_table = booking_table
        self._booking_leases = booking_leases
        self._metrics = metrics
        self._clock = clock
        self._under_way: dict[Key, list[asyncio.Event]] = {}
        """Selections that run, each with the events of the callers that wait for it."""

    async def once(
        self, context: RequestContext, key: Key, select: Callable[[], Awaitable[SelectWorkerResponse]]
    ) -> SelectWorkerResponse:
        """Returns the outcome of the first selection with a key. Calls ``select`` only if there was none.

        Raises:
            RequestIdReused: the key is booked for another prompt or component.
            SessionLost: the session of the call is not open.
            KvRouterError: raised by ``select``.
        """
        while True:
            repeated = self._booked(context, key)
            if repeated is not None:
                return repeated
            under_way = self._under_way.get(key)
            if under_way is None:
                break
            ended = asyncio.Event()
            under_way.append(ended)
            await ended.wait()
        self._under_way[key] = []
        try:
            return await select()
        finally:
            for ended in self._under_way.pop(key):
                ended.set()

    def booked_meanwhile(self, context: RequestContext, key: Key) -> SelectWorkerResponse:
        """Returns the outcome at another Scheduler that announced it while the request was decided here.

        Raises:
            RequestIdReused: the key is booked for another prompt or component.
            SessionLost: the session of the call is not open.
            BookingFreed: the booking was freed meanwhile.
        """
        repeated = self._booked(context, key)
        if repeated is None:
            raise BookingFreed(key[0])
        return repeated

    def _booked(self, context: RequestContext, key: Key) -> SelectWorkerResponse | None:
        now = self._clock()
        booking = self._booking_table.find(key, now)
        if booking is None:
            return None
        if (
            booking.component != context.pool.name
            or booking.prompt.sequence_hashes != context.prompt.sequence_hashes
            or booking.prompt.tokens != context.prompt.tokens
        ):
            raise RequestIdReused(key[0])
        # Booked at another Scheduler, whose caller has come here.
        options = context.booking
        self._booking_leases.own(booking, options.session_id, options.lease_seconds, now, options.opening_number)
        self._metrics.repeated.inc()
        outcome = SelectWorkerResponse()
        outcome.CopyFrom(booking.outcome)
        outcome.repeated = True
        return outcome
