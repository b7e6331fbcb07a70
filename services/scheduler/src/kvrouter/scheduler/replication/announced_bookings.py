"""Keys of the bookings announced by one incarnation of a Scheduler as its own, with a digest for comparisons.

They hold no load and decide nothing: the booking table does. They follow from the announcements alone, so a
sender and a receiver of the same announcements have the same digest, whatever their booking tables hold. They also tell
which bookings a Scheduler no longer owns when one of its sessions ends, or when the Scheduler itself is gone.

    digest = sum over the bookings of XXH3-64(request id, attempt, stage, state)  mod 2^64

``SyncHeartbeat`` in the contract defines the encoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash
from kvrouter.scheduler.identifiers import Key

_SEED = 1337
_AFTER_ID = struct.Struct("<IIB")
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _AnnouncedBooking:
    session_id: str
    prefilled: bool


class AnnouncedBookings:
    """Announced keys, each with its session and whether its prompt is computed."""

    def __init__(self) -> None:
        self._bookings: dict[Key, _AnnouncedBooking] = {}
        self._of_sessions: dict[str, set[Key]] = {}
        self._digest = 0

    def __len__(self) -> int:
        """Returns the number of bookings."""
        return len(self._bookings)

    def __contains__(self, key: Key) -> bool:
        """Returns whether a key is among them."""
        return key in self._bookings

    def __iter__(self) -> Iterator[Key]:
        """Iterates over the keys as they are at this moment."""
        return iter(list(self._bookings))

    @property
    def digest(self) -> int:
        """Their digest."""
        return self._digest

    def put(self, key: Key, session_id: str) -> None:
        """Adds a booking of a session, or of a lease if ``session_id`` is empty. A known booking moves to it."""
        announced = self._bookings.get(key)
        if announced is None:
            self._bookings[key] = _AnnouncedBooking(session_id, prefilled=False)
            self._count(key, 1, prefilled=False)
        else:
            self._leave_session(key, announced)
            announced.session_id = session_id
        if session_id:
            self._of_sessions.setdefault(session_id, set()).add(key)

    def prefilled(self, key: Key) -> bool:
        """Records the end of a prefill. Returns whether it changes anything."""
        announced = self._bookings.get(key)
        if announced is None or announced.prefilled:
            return False
        announced.prefilled = True
        self._count(key, -1, prefilled=False)
        self._count(key, 1, prefilled=True)
        return True

    def drop(self, key: Key) -> bool:
        """Removes a booking. Returns whether it was there."""
        announced = self._bookings.pop(key, None)
        if announced is None:
            return False
        self._leave_session(key, announced)
        self._count(key, -1, prefilled=announced.prefilled)
        return True

    def of_session(self, session_id: str) -> list[Key]:
        """Returns the keys of a session."""
        return list(self._of_sessions.get(session_id, ()))

    def _leave_session(self, key: Key, announced: _AnnouncedBooking) -> None:
        keys = self._of_sessions.get(announced.session_id)
        if keys is None:
            return
        keys.discard(key)
        if not keys:
            del self._of_sessions[announced.session_id]

    def _count(self, key: Key, sign: int, *, prefilled: bool) -> None:
        request_id, attempt, stage = key
        encoded = request_id.encode() + _AFTER_ID.pack(attempt, stage, prefilled)
        self._digest = (self._digest + sign * xxhash.xxh3_64_intdigest(encoded, seed=_SEED)) & _MASK
