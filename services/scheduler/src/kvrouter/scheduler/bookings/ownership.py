"""Who owns the bookings of this Scheduler: sessions and leases, which decide when bookings end.

A session's booking ends with the session, after a grace; a leased one when no call has named it for the
duration of the lease. Time is a parameter, in seconds of a monotonic clock. The bookings themselves are in the table.
Silence of a session is counted in ticks of this process's event loop: a Scheduler after a freeze of its own does
not take its clients for gone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass, field

from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.bookings.booking import Booking, Placement
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import rank_of
from kvrouter.v1.errors import RequestIdReused, SessionLost

_LEAST_SWEEP = 1024
"""Number of leases in the heap below which it is not swept."""

SILENT_TICKS = 10
"""Consecutive ticks without a call of a session after which the session is closed."""


class BookingFreed(RequestIdReused):
    """The booking was freed already: a later selection books nothing. Crosses the wire as its base."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.args = (f"this booking of the request id {request_id[:128]!r} was freed already",)


@dataclass(slots=True)
class Session:
    """A client's session. Only ``BookingOwnership`` opens and closes it."""

    client_name: str
    opening_number: int = 0
    """The client's number of the last opening; 0 if it numbers none."""
    open: bool = True
    ends: float = 0.0
    """End of its grace, once it is closed."""
    acknowledged: int = 0
    """Number of the last update, applied or refused."""
    silent_ticks: int = 0
    """Ticks since the last call about it."""


@dataclass(eq=False)
class BookingOwnership:
    """Sessions and leases over a booking table.

    Bookings outlive their session by ``session_grace_seconds``.
    """

    booking_table: BookingTable
    _: KW_ONLY
    session_grace_seconds: float
    _sessions: dict[str, Session] = field(default_factory=dict, init=False)
    _leases: list[tuple[float, int, Key]] = field(default_factory=list, init=False)
    """A heap. An entry has the end of the lease when it was pushed; a renewal is noticed when the entry is due."""
    _order: Iterator[int] = field(default_factory=itertools.count, init=False)

    @property
    def sessions(self) -> int:
        """Number of sessions, open or in their grace."""
        return len(self._sessions)

    def check_bookable(self, key: Key, session_id: str, opening_number: int = 0) -> None:
        """Checks a key before it is booked for a session, or under a lease if ``session_id`` is empty.

        A key dropped with its owner but never freed is bookable in an open session, because the client of the
        session vouches for it. A lease has nobody who does.

        Raises:
            BookingFreed: it was freed; or, for a lease, it was dropped with its owner.
            SessionLost: the session is not open, or its last opening has another number.
        """
        if session_id:
            self.check_open(session_id, opening_number)
        if self.booking_table.was_freed(key) or (not session_id and self.booking_table.is_gone(key)):
            raise BookingFreed(key[0])

    def book(self, booking: Booking, now: float) -> bool:
        """Books for the booking's session or lease. The key passed ``check_bookable``.

        Returns False, and changes nothing, if the key is booked.

        Raises:
            TooLarge: the component has as many bookings as it may have.
        """
        booking.lease_until = now + booking.lease_seconds
        is_booked = self.booking_table.book(booking, self.booking_table.here)
        if is_booked and not booking.session_id:
            self._watch_lease(booking)
        return is_booked

    def own(self, booking: Booking, session_id: str, lease_seconds: float, now: float, opening_number: int = 0) -> None:
        """Makes a session or a lease own a booking of other Schedulers.

        Raises:
            BookingFreed: it was freed.
            SessionLost: the session is not open, or its last opening has another number.
        """
        if self.booking_table.is_here(booking):
            return
        self.check_bookable(booking.key, session_id, opening_number)
        placement = Placement(rank_of(booking.outcome), booking.outcome.prefill_tokens)
        self.booking_table.own(
            booking, placement, session_id=session_id, lease_seconds=lease_seconds, lease_until=now + lease_seconds
        )
        if not session_id:
            self._watch_lease(booking)

    def adopt(self, booking: Booking, session_id: str, placement: Placement) -> None:
        """Makes an open session own a booking, at the placement stated by its client."""
        here = self.booking_table.here
        if booking.session_id != session_id or booking.owners.get(here) != placement:
            self.booking_table.own(booking, placement, session_id=session_id)

    def open_session(self, session_id: str, client_name: str, opening_number: int = 0) -> Session:
        """Opens a session, or opens it again with its bookings.

        Args:
            session_id: The session.
            client_name: Its client, for logs.
            opening_number: The client's number of this opening; 0 is not compared.

        Raises:
            SessionLost: a later opening came before. Calls may arrive out of order after a freeze.
        """
        session = self._sessions.get(session_id)
        if session is not None and 0 < opening_number <= session.opening_number:
            raise SessionLost(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(client_name)
        session.client_name, session.open, session.silent_ticks = client_name, True, 0
        session.opening_number = opening_number or session.opening_number
        return session

    def free_all_but(self, session_id: str, live: Collection[Key]) -> int:
        """Frees the bookings of a session missing in its client's list. Returns how many.

        Their frees went to another Scheduler while the session was there.
        """
        ended = self.booking_table.of_session(session_id) - set(live)
        for key in ended:
            self.booking_table.free(key)
        return len(ended)

    def check_open(self, session_id: str, opening_number: int = 0) -> Session:
        """Returns the session of a call. The call shows its client to be alive.

        Args:
            session_id: The session.
            opening_number: The opening of the call; 0 for any.

        Raises:
            SessionLost: the session is not open, or its last opening has another number.
        """
        session = self._sessions.get(session_id)
        if session is None or not session.open or opening_number not in (0, session.opening_number):
            raise SessionLost(session_id)
        session.silent_ticks = 0
        return session

    def close_session(self, session_id: str, now: float, opening_number: int = 0) -> bool:
        """Begins the grace of a session. Returns whether it was open, with the opening number unless it is 0."""
        session = self._sessions.get(session_id)
        if session is None or not session.open or opening_number not in (0, session.opening_number):
            return False
        session.open, session.ends = False, now + self.session_grace_seconds
        if not self.booking_table.of_session(session_id):
            del self._sessions[session_id]
        return True

    def tick(self) -> list[str]:
        """Counts a tick. Returns the open sessions without a call for ``SILENT_TICKS``."""
        silent = []
        for session_id, session in self._sessions.items():
            if session.open:
                session.silent_ticks += 1
                if session.silent_ticks > SILENT_TICKS:
                    silent.append(session_id)
        return silent

    def expire(self, now: float) -> None:
        """Ends expired leases and sessions after their grace."""
        self._expire_leases(now)
        due = [name for name, session in self._sessions.items() if not session.open and session.ends <= now]
        for session_id in due:
            self.booking_table.end_session(session_id, self._sessions.pop(session_id).client_name)

    def _expire_leases(self, now: float) -> None:
        while self._leases and self._leases[0][0] <= now:
            booking = self._leased(heapq.heappop(self._leases)[2])
            if booking is None:
                continue
            if booking.lease_until > now:
                heapq.heappush(self._leases, (booking.lease_until, next(self._order), booking.key))
            else:
                self.booking_table.free(booking.key, is_expired=True)

    def _watch_lease(self, booking: Booking) -> None:
        heapq.heappush(self._leases, (booking.lease_until, next(self._order), booking.key))
        # Most bookings are freed long before their lease ends. A sweep removes the entries that they leave behind.
        if len(self._leases) > 2 * len(self.booking_table) + _LEAST_SWEEP:
            self._leases = [entry for entry in self._leases if self._leased(entry[2]) is not None]
            heapq.heapify(self._leases)

    def _leased(self, key: Key) -> Booking | None:
        booking = self.booking_table.get(key)
        is_leased = booking is not None and not booking.session_id and self.booking_table.is_here(booking)
        return booking if is_leased else None
