"""The one table of live bookings: this Scheduler's own, and those counted for other Schedulers.

A booking lives while at least one Scheduler owns it and nobody has freed it. Updates merge by maximum, in any order and
however often they arrive: booked < prefilled < freed, and the highest number of output tokens. Its load is therefore
counted once, whether it was booked here, announced by another Scheduler, or both. If Schedulers booked a request on
different ranks, the rank of the greatest (incarnation, id) counts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple, TypeVar

from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.bookings.booking import (
    Booked,
    Booking,
    BookingChange,
    Freed,
    Moved,
    OutputGenerated,
    OwnerAdded,
    OwnerRemoved,
    Placement,
    PrefillCompleted,
    SchedulerIncarnation,
    SessionEnded,
)
from kvrouter.scheduler.load.booked_load import NOTHING
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.names import ComponentName

_Change = TypeVar("_Change", bound=BookingChange)


class Progress(NamedTuple):
    """Progress of a booking dropped with its last owner.

    Its other owners may lack reports received here, so the progress counts when the booking returns.
    """

    component: ComponentName
    prefilled: bool
    output_tokens: int
    is_local: bool
    """Whether some of it was reported here, from where the others learn it."""


class BookingTable:
    """Live bookings by key, ended keys, and their load. A booking is released exactly once."""

    def __init__(self, here: SchedulerIncarnation = (0, ""), *, tombstones: int = 1 << 16) -> None:
        """Creates an empty table.

        Args:
            here: This Scheduler.
            tombstones: Number of freed keys to remember, against late calls for them.
        """
        self.here = here
        self._bookings: dict[Key, Booking] = {}
        self._of_sessions: dict[str, set[Key]] = {}
        # None for a key that was freed. One that was dropped with its last owner may still be booked elsewhere.
        self._gone: OrderedDict[Key, Progress | None] = OrderedDict()
        self._max_gone = tombstones
        # By kind, since most listeners need few kinds, and calls about bookings are made for each token.
        self._listeners: dict[type[Any], list[Callable[[Any], None]]] = {}

    def subscribe(self, kind: type[_Change], listener: Callable[[_Change], None]) -> None:
        """Passes every later change of one kind to a listener, which must not change the table.

        Listeners receive changes in order, and one change in the order of their subscriptions.
        """
        self._listeners.setdefault(kind, []).append(listener)

    def __len__(self) -> int:
        """Returns the number of live bookings."""
        return len(self._bookings)

    def __iter__(self) -> Iterator[Booking]:
        """Iterates over a copy of the live bookings."""
        return iter(list(self._bookings.values()))

    def get(self, key: Key) -> Booking | None:
        """Returns the live booking of a key."""
        return self._bookings.get(key)

    def find(self, key: Key, now: float) -> Booking | None:
        """Returns the live booking of a key, and renews its lease. ``now`` is in seconds."""
        booking = self._bookings.get(key)
        if booking is not None and not booking.session_id:
            booking.lease_until = now + booking.lease_seconds
        return booking

    def of_session(self, session_id: str) -> Set[Key]:
        """Returns the keys of a session of this Scheduler."""
        return self._of_sessions.get(session_id, frozenset())

    def is_here(self, booking: Booking) -> bool:
        """Returns whether this Scheduler owns a booking."""
        return self.here in booking.owners

    def is_gone(self, key: Key) -> bool:
        """Returns whether a key is remembered as freed or dropped."""
        return key in self._gone

    def was_freed(self, key: Key) -> bool:
        """Returns whether a key is remembered as freed. A key dropped with its last owner is not."""
        return key in self._gone and self._gone[key] is None

    def freed(self) -> list[Key]:
        """Returns the keys remembered as freed, oldest first."""
        return [key for key, progress in self._gone.items() if progress is None]

    def dropped(self) -> list[tuple[Key, Progress]]:
        """Returns the keys remembered as dropped with their last owner, each with its progress."""
        return [(key, progress) for key, progress in self._gone.items() if progress is not None]

    def book(self, booking: Booking, owner: SchedulerIncarnation) -> bool:
        """Books a request, without owners so far, for its first owner.

        Returns False, and changes nothing, if the key is booked.

        Raises:
            TooLarge: the component has as many bookings as it may have.
        """
        key, load, placement = booking.key, booking.pool.booked_load, booking.placement
        if key in self._bookings:
            return False
        earlier = self._gone.get(key)
        # The first token of a request that returns may have been generated before.
        expected = NOTHING if earlier is not None and earlier.prefilled else booking.expected
        if not load.book(key, placement.rank, booking.prompt, placement.prefill_tokens, expected=expected):
            return False
        self._gone.pop(key, None)
        self._bookings[key] = booking
        if earlier is not None:
            self._restore(booking, earlier)
        booking.owners[owner] = placement
        self._index(booking)
        self._publish(Booked(booking, owner))
        return True

    def add_owner(self, booking: Booking, owner: SchedulerIncarnation, placement: Placement) -> None:
        """Adds another Scheduler to the owners of a booking, or changes its placement."""
        booking.owners[owner] = placement
        self._settle(booking)
        self._publish(OwnerAdded(booking, owner))

    def own(
        self,
        booking: Booking,
        placement: Placement,
        *,
        session_id: str,
        lease_seconds: float = 0.0,
        lease_until: float = 0.0,
    ) -> None:
        """Makes a session of this Scheduler, or a lease if ``session_id`` is empty, own a live booking."""
        self._unindex(booking)
        booking.session_id, booking.lease_seconds, booking.lease_until = session_id, lease_seconds, lease_until
        self._index(booking)
        self.add_owner(booking, self.here, placement)

    def remove_owner(self, key: Key, owner: SchedulerIncarnation) -> Booking | None:
        """Removes a Scheduler from the owners of a booking, and drops the booking with its last owner.

        Returns:
            The booking; None if it had another owner.
        """
        booking = self._bookings.get(key)
        if booking is None or owner not in booking.owners:
            return None
        if owner == self.here:
            self._unindex(booking)
            booking.session_id = ""
            # The other owners may have missed what was announced while it was owned here.
            booking.has_local_progress |= booking.prefilled or booking.output_tokens > 0
        del booking.owners[owner]
        if booking.owners:
            self._settle(booking)
        else:
            reported = booking.prefilled, booking.output_tokens, booking.has_local_progress
            self._remember(key, Progress(booking.component, *reported))
            self._release(booking)
        self._publish(OwnerRemoved(booking, owner))
        return booking

    def end_session(self, session_id: str, client_name: str) -> None:
        """Removes this Scheduler from the owners of a session's bookings. ``client_name`` is for logs."""
        keys = list(self.of_session(session_id))
        bookings = [booking for key in keys if (booking := self.remove_owner(key, self.here)) is not None]
        self._publish(SessionEnded(session_id, client_name, bookings))

    def prefill_complete(self, booking: Booking, *, is_remote: bool = False) -> None:
        """Records the end of a live booking's prefill."""
        self._note_progress(booking, is_remote=is_remote)
        booking.prefilled = True
        booking.pool.booked_load.prefill_complete(booking.key)
        self._publish(PrefillCompleted(booking, is_remote))

    def generated(self, booking: Booking, output_tokens: int, *, is_remote: bool = False) -> None:
        """Notes how many tokens a live booking has generated in all."""
        self._note_progress(booking, is_remote=is_remote)
        booking.output_tokens = max(booking.output_tokens, output_tokens)
        booking.pool.booked_load.output_tokens(booking.key, booking.output_tokens)
        self._publish(OutputGenerated(booking, is_remote))

    def free(
        self,
        key: Key,
        *,
        cached_tokens: int | None = None,
        lower_cached_tokens: LowerTiers | None = None,
        output_tokens: int | None = None,
        prefilled: bool = False,
        is_remote: bool = False,
        is_expired: bool = False,
    ) -> Booking | None:
        """Ends a booking. A key without one is remembered as freed too, so that no late re-assert begins it.

        Args:
            key: The booking.
            cached_tokens: Prompt tokens found in the worker's cache; None if unknown.
            lower_cached_tokens: Those of them from below device memory; None if there are none, or if unknown.
            output_tokens: Length of its output; None if that broke off, or if unknown.
            prefilled: Whether its prompt is computed as well, as ``prefill_complete`` notes it.
            is_remote: Whether another Scheduler announced the end.
            is_expired: Whether its lease ran out.

        Returns:
            The booking; None if there was none.
        """
        booking = self._bookings.get(key)
        is_new = booking is not None or not self.was_freed(key)
        self._remember(key, None)
        if booking is not None:
            self._unindex(booking)
            self._release(booking, prefilled=prefilled)
        if is_new:
            self._publish(Freed(key, booking, is_remote, is_expired, cached_tokens, lower_cached_tokens, output_tokens))
        return booking

    def _publish(self, change: BookingChange) -> None:
        for listener in self._listeners.get(type(change), ()):
            listener(change)

    def _note_progress(self, booking: Booking, *, is_remote: bool) -> None:
        booking.has_local_progress |= not is_remote and not self.is_here(booking)

    def _index(self, booking: Booking) -> None:
        if booking.session_id:
            self._of_sessions.setdefault(booking.session_id, set()).add(booking.key)

    def _unindex(self, booking: Booking) -> None:
        keys = self._of_sessions.get(booking.session_id)
        if keys is not None:
            keys.discard(booking.key)
            if not keys:
                del self._of_sessions[booking.session_id]

    def _release(self, booking: Booking, *, prefilled: bool = False) -> None:
        del self._bookings[booking.key]
        booking.pool.booked_load.free(booking.key, prefilled=prefilled)

    def _restore(self, booking: Booking, earlier: Progress) -> None:
        """Counts the progress of a booking from before it was dropped."""
        booking.has_local_progress |= earlier.is_local
        load = booking.pool.booked_load
        if earlier.prefilled:
            booking.prefilled = True
            load.prefill_complete(booking.key)
        if earlier.output_tokens:
            booking.output_tokens = earlier.output_tokens
            load.output_tokens(booking.key, earlier.output_tokens)

    def _remember(self, key: Key, progress: Progress | None) -> None:
        self._gone[key] = progress
        self._gone.move_to_end(key)
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def _settle(self, booking: Booking) -> None:
        """Counts a booking where the greatest of its owners has it."""
        placement = booking.owners[max(booking.owners)]
        if placement == booking.placement:
            return
        booking.placement = placement
        key, load = booking.key, booking.pool.booked_load
        load.free(key)
        load.book(key, placement.rank, booking.prompt, placement.prefill_tokens)
        if booking.prefilled:
            load.prefill_complete(key)
        load.output_tokens(key, booking.output_tokens)
        self._publish(Moved(booking))
