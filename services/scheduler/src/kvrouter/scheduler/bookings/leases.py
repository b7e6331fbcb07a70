"""Who owns the bookings, and when they go: with their session after a grace, at the end of a lease, or when freed.

The one place that knows every owner at this Scheduler, over all components. Time is handed in, seconds of a monotonic
clock. What happens here to a booking is told to a witness, which tells the other Schedulers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from kvrouter.runtime.errors import RequestIdReused, SessionLost
from kvrouter.scheduler.bookings.table import Booking, BookingTable, Placement, SchedulerIncarnation
from kvrouter.scheduler.identifiers import Key, rank_of
from kvrouter.v1.names import ComponentName

__all__ = ["Booking", "BookingFreed", "BookingLeases", "EndedSession", "Expired", "Witness"]

_LEAST_SWEEP = 1024
"""Entries of the heap of leases below which a sweep is not worth it."""


class BookingFreed(RequestIdReused):
    """The booking was freed already: a selection that comes after that books nothing. Crosses the wire as its base."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.args = (f"this booking of the request id {request_id[:128]!r} was freed already",)


class Witness(Protocol):
    """Is told of what happens to bookings at this Scheduler, after it has happened."""

    def owned(self, booking: Booking) -> None:
        """It was booked here, or has another owner here."""
        ...

    def prefilled(self, booking: Booking) -> None:
        """Its prompt is computed."""
        ...

    def generated(self, booking: Booking) -> None:
        """It has generated more tokens."""
        ...

    def freed(self, key: Key, component: ComponentName | None) -> None:
        """It has ended; without a component where the key is unknown here."""
        ...

    def session_ended(self, session_id: str, components: Collection[ComponentName]) -> None:
        """A session's grace is over; it had bookings in these components."""
        ...


class _NobodyListens:
    def owned(self, booking: Booking) -> None:
        pass

    def prefilled(self, booking: Booking) -> None:
        pass

    def generated(self, booking: Booking) -> None:
        pass

    def freed(self, key: Key, component: ComponentName | None) -> None:
        pass

    def session_ended(self, session_id: str, components: Collection[ComponentName]) -> None:
        pass


@dataclass(slots=True)
class _Session:
    client_name: str
    token: int
    """Which stream holds it."""
    opening_number: int = 0
    """The client's number of the last opening; 0 where it numbers none."""
    open: bool = True
    ends: float = 0.0
    """When its bookings go, once it is closed."""
    keys: set[Key] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """A session whose grace is over."""

    session_id: str
    client_name: str
    bookings: int
    """Bookings that it owned."""


@dataclass(frozen=True, slots=True)
class Expired:
    """What time has ended."""

    leases: list[Booking]
    sessions: list[EndedSession]


class BookingLeases:
    """Bookings by key, with their owners here."""

    def __init__(
        self, *, session_grace_seconds: float, tombstones: int = 1 << 16, scheduler: SchedulerIncarnation = (0, "")
    ) -> None:
        """Nothing is booked.

        Args:
            session_grace_seconds: How long bookings outlive the stream of their session.
            tombstones: Freed keys that are remembered, so that a late call books none of them again.
            scheduler: Incarnation and id of this Scheduler.
        """
        self.booking_table = BookingTable(scheduler, self._disown, tombstones=tombstones)
        """Every live booking, those that only other Schedulers hold among them."""
        self.witness: Witness = _NobodyListens()
        self._grace = session_grace_seconds
        self._sessions: dict[str, _Session] = {}
        # An entry holds where a lease was to end when it was pushed; renewals are seen when it comes up.
        self._leases: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._tokens = itertools.count(1)

    def __len__(self) -> int:
        """Live bookings."""
        return len(self.booking_table)

    @property
    def sessions(self) -> int:
        """Sessions that are open or in their grace."""
        return len(self._sessions)

    def find(self, key: Key, now: float) -> Booking | None:
        """The live booking of a key, its lease renewed."""
        booking = self.booking_table.get(key)
        if booking is not None and not booking.session_id:
            booking.lease_until = now + booking.lease_seconds
        return booking

    def was_freed(self, key: Key) -> bool:
        """Whether the key is remembered as freed. One that went with its owner was not: that may come back."""
        return self.booking_table.was_freed(key)

    def check_bookable(self, key: Key, session_id: str, token: int | None = None) -> None:
        """Accepts a key that is to be booked for a session, or for a lease where ``session_id`` is empty.

        A key that was dropped with its owner but never freed is bookable in an open session: the client of that session
        vouches for it. A lease has nobody who does.

        Raises:
            BookingFreed: it was freed; or, for a lease, it went with its owner.
            SessionLost: there is no such open session, or another stream than that of ``token`` holds it.
        """
        if session_id:
            self.check_open(session_id, token)
        if self.booking_table.was_freed(key) or (not session_id and self.booking_table.is_gone(key)):
            raise BookingFreed(key[0])

    def add(self, booking: Booking, now: float) -> None:
        """Takes a booking in whose key passed ``check_bookable`` and is booked in its slots."""
        self.booking_table.add(booking, self.booking_table.here)
        self._own(booking, now)

    def own(
        self, booking: Booking, session_id: str, lease_seconds: float, now: float, token: int | None = None
    ) -> None:
        """Makes a session, or a lease, own a booking that was known through other Schedulers only.

        Raises:
            SessionLost: there is no such open session, or another stream than that of ``token`` holds it.
        """
        if self.booking_table.is_here(booking):
            return
        self.check_bookable(booking.key, session_id, token)
        answered = booking.outcome
        self.booking_table.add_owner(
            booking, self.booking_table.here, Placement(rank_of(answered), answered.prefill_tokens)
        )
        booking.session_id, booking.lease_seconds = session_id, lease_seconds
        self._own(booking, now)

    def adopt(self, booking: Booking, session_id: str, place: Placement) -> None:
        """Makes an open session the owner of a booking, which is at that place by its own account."""
        here = self.booking_table.here
        is_same = self.booking_table.is_here(booking) and self.booking_table.place(booking, here) == place
        if is_same and booking.session_id == session_id:
            return
        self._disown(booking)
        self.booking_table.add_owner(booking, here, place)
        booking.session_id = session_id
        self._sessions[session_id].keys.add(booking.key)
        self.witness.owned(booking)

    def prefill_complete(self, booking: Booking) -> None:
        """The prompt of a live booking is computed."""
        self._note_announced(booking)
        self.booking_table.prefill_complete(booking)
        self.witness.prefilled(booking)

    def generated(self, booking: Booking, output_tokens: int) -> None:
        """A live booking has generated so many tokens."""
        self._note_announced(booking)
        self.booking_table.generated(booking, output_tokens)
        self.witness.generated(booking)

    def free(self, key: Key) -> Booking | None:
        """Releases a booking. A key that is unknown is remembered as freed all the same."""
        known_before = self.booking_table.was_freed(key)
        booking = self.booking_table.free(key)
        if booking is not None or not known_before:
            self.witness.freed(key, None if booking is None else booking.component)
        return booking

    def open_session(self, session_id: str, client_name: str, opening_number: int = 0) -> int:
        """Opens a session, or takes over one of that id with its bookings. Returns the token of its stream.

        Args:
            session_id: The session.
            client_name: Its client, for logs.
            opening_number: The client's number of this opening; 0 is not compared.

        Raises:
            SessionLost: a later opening came before. Streams may arrive out of order after a freeze.
        """
        session = self._sessions.get(session_id)
        if session is not None and 0 < opening_number <= session.opening_number:
            raise SessionLost(session_id)
        token = next(self._tokens)
        if session is None:
            session = self._sessions[session_id] = _Session(client_name, token)
        session.client_name, session.token, session.open = client_name, token, True
        session.opening_number = opening_number or session.opening_number
        return token

    def free_all_but(self, session_id: str, live: Collection[Key]) -> int:
        """Frees the bookings of a session that its client no longer lists. Returns how many.

        Their frees went to another Scheduler while the session was there.
        """
        dead = self._sessions[session_id].keys.difference(live)
        for key in dead:
            self.free(key)
        return len(dead)

    def check_open(self, session_id: str, token: int | None = None) -> None:
        """Accepts a session that is open, and held by the stream of ``token`` where one is given.

        Raises:
            SessionLost: it is not.
        """
        session = self._sessions.get(session_id)
        if session is None or not session.open or token not in (None, session.token):
            raise SessionLost(session_id)

    def holds(self, session_id: str, token: int) -> bool:
        """Whether the stream with that token holds the session still."""
        session = self._sessions.get(session_id)
        return session is not None and session.token == token

    def close_session(self, session_id: str, token: int, now: float) -> None:
        """The session's stream is gone: its bookings go after the grace. A stream that was replaced changes nothing."""
        if not self.holds(session_id, token):
            return
        session = self._sessions[session_id]
        if not session.open:
            return
        session.open, session.ends = False, now + self._grace
        if not session.keys:
            del self._sessions[session_id]

    def expire(self, now: float) -> Expired:
        """Releases what leases and graces no longer hold."""
        return Expired(self._expired_leases(now), self._ended_sessions(now))

    def _expired_leases(self, now: float) -> list[Booking]:
        expired = []
        while self._leases and self._leases[0][0] <= now:
            _, _, key = heapq.heappop(self._leases)
            booking = self.booking_table.get(key)
            if booking is None or not self._is_leased(key):
                continue
            if booking.lease_until > now:
                heapq.heappush(self._leases, (booking.lease_until, next(self._order), key))
                continue
            self.free(key)
            expired.append(booking)
        return expired

    def _ended_sessions(self, now: float) -> list[EndedSession]:
        due = [name for name, session in self._sessions.items() if not session.open and session.ends <= now]
        ended = []
        for session_id in due:
            session = self._sessions.pop(session_id)
            went = [self.booking_table.remove_owner(key, self.booking_table.here) for key in session.keys]
            for booking in went:
                if booking is not None:
                    booking.session_id = ""
            if session.keys:
                self.witness.session_ended(session_id, {booking.component for booking in went if booking is not None})
            ended.append(EndedSession(session_id, session.client_name, len(session.keys)))
        return ended

    def _own(self, booking: Booking, now: float) -> None:
        if booking.session_id:
            self._sessions[booking.session_id].keys.add(booking.key)
        else:
            self._push_lease(booking, now)
        self.witness.owned(booking)

    def _disown(self, booking: Booking) -> None:
        session = self._sessions.get(booking.session_id)
        if session is not None:
            session.keys.discard(booking.key)

    def _note_announced(self, booking: Booking) -> None:
        booking.announced = booking.announced or not self.booking_table.is_here(booking)

    def _push_lease(self, booking: Booking, now: float) -> None:
        booking.lease_until = now + booking.lease_seconds
        heapq.heappush(self._leases, (booking.lease_until, next(self._order), booking.key))
        # Bookings are mostly freed long before their lease ends; what they leave behind is swept out now and then.
        if len(self._leases) > 2 * len(self.booking_table) + _LEAST_SWEEP:
            self._leases = [entry for entry in self._leases if self._is_leased(entry[2])]
            heapq.heapify(self._leases)

    def _is_leased(self, key: Key) -> bool:
        booking = self.booking_table.get(key)
        return booking is not None and not booking.session_id and self.booking_table.is_here(booking)
