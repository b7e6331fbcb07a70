"""Who owns the bookings, and when they go: with their session after a grace, at the end of a lease, or when freed.

The one place that knows every booking of this Scheduler, over all components. Time is handed in, seconds of a monotonic
clock.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from kvrouter.runtime.errors import RequestIdReused, SessionLost
from kvrouter.scheduler.slots import Key, SlotManager
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

_LEAST_SWEEP = 1024
"""Entries of the heap of leases below which a sweep is not worth it."""


class BookingFreed(RequestIdReused):
    """The booking was freed already: a selection that comes after that books nothing. Crosses the wire as its base."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.args = (f"this booking of the request id {request_id[:128]!r} was freed already",)


@dataclass(slots=True)
class Record:
    """A live booking."""

    key: Key
    component: ComponentName
    slots: SlotManager = field(repr=False)
    outcome: SelectWorkerResponse
    """What the selection answered."""
    audited: bool
    """Whether its overlap was predicted by an Indexer, so that the worker's count can be held against it."""
    session_id: str = ""
    """Session that owns it; empty for a lease."""
    lease_seconds: float = 0.0
    """Time for which it lives after the last call that named it; without meaning in a session."""
    lease_until: float = 0.0


@dataclass(slots=True)
class _Session:
    client_name: str
    token: int
    """Which stream holds it."""
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
    """Bookings that went with it."""


@dataclass(frozen=True, slots=True)
class Expired:
    """What time has ended."""

    leases: list[Record]
    sessions: list[EndedSession]


class Ledger:
    """Bookings by key, with their owners. A booking is released exactly once."""

    def __init__(self, *, session_grace_seconds: float, tombstones: int = 1 << 16) -> None:
        """``tombstones`` is how many freed keys are remembered, so that a late call books none of them again."""
        self._grace = session_grace_seconds
        self._records: dict[Key, Record] = {}
        self._sessions: dict[str, _Session] = {}
        self._freed: OrderedDict[Key, None] = OrderedDict()
        self._max_freed = tombstones
        # An entry holds where a lease was to end when it was pushed; renewals are seen when it comes up.
        self._leases: list[tuple[float, int, Key]] = []
        self._order = itertools.count()
        self._tokens = itertools.count(1)

    def __len__(self) -> int:
        """Live bookings."""
        return len(self._records)

    @property
    def sessions(self) -> int:
        """Sessions that are open or in their grace."""
        return len(self._sessions)

    def find(self, key: Key, now: float) -> Record | None:
        """The live booking of a key, its lease renewed."""
        record = self._records.get(key)
        if record is not None and not record.session_id:
            record.lease_until = now + record.lease_seconds
        return record

    def was_freed(self, key: Key) -> bool:
        """Whether the key is remembered as freed."""
        return key in self._freed

    def check_bookable(self, key: Key, session_id: str) -> None:
        """Accepts a key that is to be booked.

        Raises:
            BookingFreed: it was freed.
            SessionLost: there is no such open session.
        """
        if key in self._freed:
            raise BookingFreed(key[0])
        session = self._sessions.get(session_id)
        if session_id and (session is None or not session.open):
            raise SessionLost(session_id)

    def add(self, record: Record, now: float) -> None:
        """Takes a booking in whose key passed ``check_bookable`` and is booked in its slots."""
        self._records[record.key] = record
        if record.session_id:
            self._sessions[record.session_id].keys.add(record.key)
        else:
            self._push_lease(record, now)

    def adopt(self, record: Record, session_id: str) -> None:
        """Makes an open session the owner of a booking."""
        owner = self._sessions.get(record.session_id)
        if owner is not None:
            owner.keys.discard(record.key)
        record.session_id = session_id
        self._sessions[session_id].keys.add(record.key)

    def free(self, key: Key) -> Record | None:
        """Releases a booking. A key that is unknown is remembered as freed all the same."""
        self._remember_freed(key)
        return self._release(key)

    def open_session(self, session_id: str, client_name: str) -> int:
        """Opens a session, or takes over one of that id with its bookings. Returns the token to close it with."""
        token = next(self._tokens)
        session = self._sessions.setdefault(session_id, _Session(client_name, token))
        session.client_name, session.token, session.open = client_name, token, True
        return token

    def holds(self, session_id: str, token: int) -> bool:
        """Whether the stream with that token holds the session still."""
        session = self._sessions.get(session_id)
        return session is not None and session.token == token

    def close_session(self, session_id: str, token: int, now: float) -> None:
        """The session's stream is gone: its bookings go after the grace. A stream that was replaced changes nothing."""
        if not self.holds(session_id, token):
            return
        session = self._sessions[session_id]
        session.open, session.ends = False, now + self._grace
        if not session.keys:
            del self._sessions[session_id]

    def expire(self, now: float) -> Expired:
        """Releases what leases and graces no longer hold."""
        return Expired(self._expired_leases(now), self._ended_sessions(now))

    def _expired_leases(self, now: float) -> list[Record]:
        expired = []
        while self._leases and self._leases[0][0] <= now:
            _, _, key = heapq.heappop(self._leases)
            record = self._records.get(key)
            if record is None or record.session_id:
                continue
            if record.lease_until > now:
                heapq.heappush(self._leases, (record.lease_until, next(self._order), key))
                continue
            self.free(key)
            expired.append(record)
        return expired

    def _ended_sessions(self, now: float) -> list[EndedSession]:
        due = [name for name, session in self._sessions.items() if not session.open and session.ends <= now]
        ended = []
        for session_id in due:
            session = self._sessions.pop(session_id)
            for key in session.keys:
                self._remember_freed(key)
                self._records.pop(key).slots.free(key)
            ended.append(EndedSession(session_id, session.client_name, len(session.keys)))
        return ended

    def _release(self, key: Key) -> Record | None:
        record = self._records.pop(key, None)
        if record is None:
            return None
        record.slots.free(key)
        session = self._sessions.get(record.session_id)
        if session is not None:
            session.keys.discard(key)
        return record

    def _push_lease(self, record: Record, now: float) -> None:
        record.lease_until = now + record.lease_seconds
        heapq.heappush(self._leases, (record.lease_until, next(self._order), record.key))
        # Bookings are mostly freed long before their lease ends; what they leave behind is swept out now and then.
        if len(self._leases) > 2 * len(self._records) + _LEAST_SWEEP:
            self._leases = [entry for entry in self._leases if self._is_leased(entry[2])]
            heapq.heapify(self._leases)

    def _is_leased(self, key: Key) -> bool:
        record = self._records.get(key)
        return record is not None and not record.session_id

    def _remember_freed(self, key: Key) -> None:
        self._freed[key] = None
        self._freed.move_to_end(key)
        if len(self._freed) > self._max_freed:
            self._freed.popitem(last=False)
