"""Bookings that one incarnation of a Scheduler owns in one component, with a digest that replicas compare.

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
class _OwnedBooking:
    session_id: str
    prefilled: bool


class OwnedBookings:
    """Keys with their session and whether their prompt is computed."""

    def __init__(self) -> None:
        self._owned: dict[Key, _OwnedBooking] = {}
        self._sessions: dict[str, set[Key]] = {}
        self._digest = 0

    def __len__(self) -> int:
        """Returns the number of bookings."""
        return len(self._owned)

    def __contains__(self, key: Key) -> bool:
        """Returns whether a key is among them."""
        return key in self._owned

    def __iter__(self) -> Iterator[Key]:
        """Iterates over the keys as they are at this moment."""
        return iter(list(self._owned))

    @property
    def digest(self) -> int:
        """Their digest."""
        return self._digest

    def put(self, key: Key, session_id: str) -> None:
        """Adds a booking of a session, or of a lease if ``session_id`` is empty. A known booking moves to it."""
        owned_booking = self._owned.get(key)
        if owned_booking is None:
            self._owned[key] = _OwnedBooking(session_id, prefilled=False)
            self._count(key, 1, prefilled=False)
        else:
            self._leave_session(key, owned_booking)
            owned_booking.session_id = session_id
        if session_id:
            self._sessions.setdefault(session_id, set()).add(key)

    def prefilled(self, key: Key) -> bool:
        """Notes that a prompt is computed. Returns whether that changes anything."""
        owned_booking = self._owned.get(key)
        if owned_booking is None or owned_booking.prefilled:
            return False
        owned_booking.prefilled = True
        self._count(key, -1, prefilled=False)
        self._count(key, 1, prefilled=True)
        return True

    def drop(self, key: Key) -> bool:
        """Removes a booking. Returns whether it was there."""
        owned_booking = self._owned.pop(key, None)
        if owned_booking is None:
            return False
        self._leave_session(key, owned_booking)
        self._count(key, -1, prefilled=owned_booking.prefilled)
        return True

    def of_session(self, session_id: str) -> list[Key]:
        """Returns the keys of a session."""
        return list(self._sessions.get(session_id, ()))

    def _leave_session(self, key: Key, owned_booking: _OwnedBooking) -> None:
        keys = self._sessions.get(owned_booking.session_id)
        if keys is None:
            return
        keys.discard(key)
        if not keys:
            del self._sessions[owned_booking.session_id]

    def _count(self, key: Key, sign: int, *, prefilled: bool) -> None:
        request_id, attempt, stage = key
        encoded = request_id.encode() + _AFTER_ID.pack(attempt, stage, prefilled)
        self._digest = (self._digest + sign * xxhash.xxh3_64_intdigest(encoded, seed=_SEED)) & _MASK
