"""Counts the bookings clients make with SelectWorker, and their sessions, against the limits of their callers.

A booking counts as a running request of its caller with its tokens until it is released, its lease is over, or its
session has ended. Its prompt is charged then, because its rank was kept free for it; output it was booked for is
given back. Leases are counted from the calls this process received: a booking released at another process
counts here until its lease is over, and one of a session no call keeps here as if it had the longest lease.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.quotas import Grant, LimitReached
from kvrouter.frontend.access.refusals import RefusalReason
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.booking_updates import Key, key_of
from kvrouter.runtime.bounds import bounds_of
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.errors import BadRequest, DeadlineExceeded, DependencyAway
from prometheus_client import CollectorRegistry

_DEFAULT_LEASE_SECONDS = 3600.0
"""Lease of a booking naming none, as the contract defines it."""
_RETRY_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Booking:
    key: Key
    holder: str
    session_id: str
    lease_seconds: float
    grant: Grant | None
    prompt_tokens: int
    output_tokens: int
    made: bool = False
    """Whether a Scheduler may have it, so a release ends it."""
    timer: asyncio.TimerHandle | None = None


class ClientBookings:
    """Bookings and sessions of the clients of one process."""

    def __init__(self, settings: FrontendSettings, access: Access | None, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._access = access
        self._bookings: dict[Key, _Booking] = {}
        self._kept: Counter[str] = Counter()
        """Calls keeping each session open."""
        self._bookings_of: Counter[str] = Counter()
        self._sessions_of: Counter[str] = Counter()
        bounds = bounds_of(registry)
        bounds.add(
            "bookings_of_a_caller", lambda: max(self._bookings_of.values(), default=0), settings.max_bookings_per_caller
        )
        bounds.add(
            "sessions_of_a_caller", lambda: max(self._sessions_of.values(), default=0), settings.max_sessions_per_caller
        )

    def __len__(self) -> int:
        """Returns the number of counted bookings."""
        return len(self._bookings)

    def lease_ms(self, requested: int | None) -> int:
        """Returns the lease of a booking, milliseconds; ``requested`` is None for the default.

        Raises:
            BadRequest: it is 0 or too long.
        """
        most = int(self._settings.max_lease_seconds * 1000)
        if requested is None:
            return min(most, int(_DEFAULT_LEASE_SECONDS * 1000))
        if not 0 < requested <= most:
            raise BadRequest(
                f"lease_ms is {requested}",
                field="lease_ms",
                advice=f"Send 1 to {most}; calls that name the booking renew it.",
            )
        return requested

    @contextmanager
    def booking(
        self, booking: BookingKey, session_id: str, lease_ms: int, prompt_tokens: int, output_tokens: int
    ) -> Iterator[None]:
        """Counts a booking the current caller makes in the context. One counting already is renewed.

        Args:
            booking: Its key.
            session_id: The session owning it; empty for a lease.
            lease_ms: Its lease, milliseconds.
            prompt_tokens: Tokens of its prompt.
            output_tokens: Maximum number of its output tokens; 0 if unknown.

        Raises:
            RateLimited: the caller has too many bookings, or a limit of its key or tenant is reached.
        """
        key = key_of(booking)
        if key in self._bookings:
            yield
            self.renew(booking)
            return
        holder = self._holder()
        if self._bookings_of[holder] >= self._settings.max_bookings_per_caller:
            self._refuse(RefusalReason.BOOKINGS, self._settings.max_bookings_per_caller, "SelectWorker")
        grant = None
        if self._access is not None:
            grant = self._access.count(prompt_tokens + output_tokens, "SelectWorker", passes_empty=False).handed_over()
        lease_seconds = self._settings.max_lease_seconds if session_id else lease_ms / 1000
        made = _Booking(key, holder, session_id, lease_seconds, grant, prompt_tokens, output_tokens)
        self._bookings[key] = made
        self._bookings_of[holder] += 1
        try:
            yield
        except (DeadlineExceeded, DependencyAway):
            self._keep(made)  # A Scheduler may have made it nevertheless.
            raise
        except Exception:
            self._end(made, is_charged=False)
            raise
        except BaseException:
            self._keep(made)
            raise
        self._keep(made)

    def renew(self, booking: BookingKey) -> None:
        """Begins the lease of a booking anew."""
        known = self._bookings.get(key_of(booking))
        if known is not None and known.made:
            self._keep(known)

    def release(self, booking: BookingKey) -> None:
        """Ends a booking. One that is just being made goes on, since its release may have come before it."""
        known = self._bookings.get(key_of(booking))
        if known is not None and known.made:
            self._end(known)

    @contextmanager
    def session(self, session_id: str) -> Iterator[KeptSession]:
        """Counts a session of the current caller while the context lasts.

        Its bookings end after it, unless another call keeps it.

        Raises:
            RateLimited: the caller has too many sessions.
        """
        holder = self._holder()
        if holder and self._sessions_of[holder] >= self._settings.max_sessions_per_caller:
            self._refuse(RefusalReason.SESSIONS, self._settings.max_sessions_per_caller, "KeepSession")
        self._sessions_of[holder] += 1
        self._kept[session_id] += 1
        kept = KeptSession()
        try:
            yield kept
        finally:
            _decrement(self._sessions_of, holder)
            _decrement(self._kept, session_id)
            if not self._kept[session_id]:
                loop = asyncio.get_running_loop()
                loop.call_later(kept.grace_seconds, self._end_session, session_id)

    def _end_session(self, session_id: str) -> None:
        if not self._kept[session_id]:
            for booking in [each for each in self._bookings.values() if each.session_id == session_id]:
                self._end(booking)

    def _keep(self, booking: _Booking) -> None:
        booking.made = True
        if booking.timer is not None:
            booking.timer.cancel()
        booking.timer = asyncio.get_running_loop().call_later(booking.lease_seconds, self._expire, booking)

    def _expire(self, booking: _Booking) -> None:
        if self._kept[booking.session_id]:
            self._keep(booking)
        else:
            self._end(booking)

    def _end(self, booking: _Booking, *, is_charged: bool = True) -> None:
        if self._bookings.get(booking.key) is not booking:
            return
        del self._bookings[booking.key]
        _decrement(self._bookings_of, booking.holder)
        if booking.timer is not None:
            booking.timer.cancel()
        if booking.grant is not None:
            booking.grant.end_sequence(booking.output_tokens + (0 if is_charged else booking.prompt_tokens))
            booking.grant.end()

    def _holder(self) -> str:
        return "" if self._access is None else self._access.caller().name

    def _refuse(self, why: RefusalReason, most: int, call: str) -> NoReturn:
        message = f"the caller has its maximum of {most} {why} at this Frontend"
        reached = LimitReached(why, message, _RETRY_SECONDS)
        if self._access is None:
            raise reached
        self._access.refuse(why, reached, caller=self._access.caller(), call=call)


class KeptSession:
    """A session a call keeps open."""

    grace_seconds = 0.0
    """Time for which the Schedulers keep the bookings when it has ended."""


def _decrement(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if not counter[name]:
        del counter[name]
