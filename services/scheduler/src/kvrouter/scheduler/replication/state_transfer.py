"""Transfers the state of a Scheduler in chunks, made and applied one at a time between other work.

A state is valid for the sequence in its first chunk. Changes made meanwhile may be in it already; their events follow,
and then change nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from google.protobuf.message import Message
from kvrouter.runtime.booking_updates import Key, key_message, key_of
from kvrouter.scheduler.bookings.booking import Booking
from kvrouter.scheduler.bookings.table import Progress
from kvrouter.scheduler.replication.event_log import EventLog
from kvrouter.scheduler.replication.replicas import Replicas
from kvrouter.v1 import sync_pb2 as pb

CHUNK_BYTES = 128 << 10
"""Size at which a chunk is sent, bytes: a few milliseconds of work, and far below the limit of NATS (1 MiB)."""
MAX_BOOKINGS = 1 << 20
"""Bookings in a state above which it is refused: the limit of a component."""


class StateBroken(Exception):
    """A state is incomplete, or is not the requested one."""


def chunks(replicas: Replicas) -> Iterator[pb.SyncStateResponse]:
    """Yields the state of this Scheduler."""
    incarnation, scheduler_id = replicas.booking_table.here
    next_sequence = replicas.announcer.next_sequence
    numbers = itertools.count()
    chunk, size = pb.SyncStateResponse(), 0

    def finished(*, last: bool) -> pb.SyncStateResponse:
        chunk.scheduler_id, chunk.incarnation, chunk.next_sequence = scheduler_id, incarnation, next_sequence
        chunk.chunk, chunk.last = next(numbers), last
        return chunk

    for name, item in _items(replicas):
        getattr(chunk, name).append(item)
        size += item.ByteSize()
        if size >= CHUNK_BYTES:
            yield finished(last=False)
            chunk, size = pb.SyncStateResponse(), 0
    yield finished(last=True)


def _items(replicas: Replicas) -> Iterator[tuple[str, Message]]:
    booking_table = replicas.booking_table
    own, all_bookings, freed = list(replicas.announcer.announced), list(booking_table), booking_table.freed()
    dropped = booking_table.dropped()
    for key in own:
        booking = booking_table.get(key)
        if booking is not None:
            yield "bookings", _state(replicas.announcer.announcement(booking), booking)
    for booking in all_bookings:
        is_remote = booking.component == replicas.component and not booking_table.is_here(booking)
        if is_remote and booking.has_local_progress:
            yield "progress", _state(pb.AddRequest(booking=key_message(booking.key)), booking)
    for key, progress in dropped:
        if progress.component == replicas.component and progress.is_local:
            yield "progress", _state(pb.AddRequest(booking=key_message(key)), progress)
    for key in freed:
        yield "tombstones", key_message(key)


def _state(announced: pb.AddRequest, progress: Booking | Progress) -> pb.BookingState:
    return pb.BookingState(request=announced, prefill_complete=progress.prefilled, output_tokens=progress.output_tokens)


class Fetch:
    """Receives the state of one incarnation. Its events wait meanwhile."""

    def __init__(self, replicas: Replicas, event_log: EventLog) -> None:
        self._replicas = replicas
        self._event_log = event_log
        self._owned = set[Key]()
        self._next_chunk = 0
        self._next_sequence = 0
        self._before = (event_log.next_sequence, event_log.announced.digest)
        event_log.fetch()

    def take(self, chunk: pb.SyncStateResponse) -> bool:
        """Applies a chunk. Returns whether it was the last.

        Raises:
            StateBroken: it is not the next chunk of the incarnation's state.
        """
        event_log = self._event_log
        if event_log not in self._replicas.logs:
            raise StateBroken("its Scheduler is no longer followed")
        event_log.received_at = self._replicas.clock()
        if chunk.scheduler_id == event_log.scheduler[1] and chunk.incarnation != event_log.scheduler[0]:
            self._replicas.settle(chunk.scheduler_id, chunk.incarnation)
            raise StateBroken(f"it is in incarnation {chunk.incarnation}, not {event_log.scheduler[0]}")
        if chunk.scheduler_id != event_log.scheduler[1] or chunk.chunk != self._next_chunk:
            raise StateBroken(
                f"expected chunk {self._next_chunk}, received chunk {chunk.chunk} of {chunk.scheduler_id[:64]!r}"
            )
        if self._next_chunk == 0:
            self._next_sequence = chunk.next_sequence
        self._next_chunk += 1
        self._owned.update(key_of(state.request.booking) for state in chunk.bookings)
        for event in _as_events(chunk):
            self._replicas.apply(event_log, event)
        if len(self._owned) > MAX_BOOKINGS:
            raise StateBroken(f"expected at most {MAX_BOOKINGS} bookings, received more")
        if chunk.last:
            self._finish()
        return chunk.last

    def give_up(self) -> None:
        """Ends an incomplete fetch. Arrived chunks are kept, because they are true."""
        self._event_log.give_up(self._replicas.clock())

    def _finish(self) -> None:
        for key in self._event_log.announced:
            if key not in self._owned:
                self._replicas.remove_owner(self._event_log, key)
        founded = self._before != (self._next_sequence, self._event_log.announced.digest)
        self._event_log.note_fetched(self._replicas.clock(), founded=founded)
        for event in self._event_log.fetched(self._next_sequence):
            self._replicas.apply(self._event_log, event)


def _as_events(chunk: pb.SyncStateResponse) -> Iterator[pb.ReplicaSyncEvent]:
    for state in itertools.chain(chunk.bookings, chunk.progress):
        key = state.request.booking
        if "rank" in state.request:
            yield pb.ReplicaSyncEvent(add_request=state.request)
        if state.prefill_complete:
            yield pb.ReplicaSyncEvent(mark_prefill_completed=pb.MarkPrefillCompleted(booking=key))
        if state.output_tokens:
            yield pb.ReplicaSyncEvent(output_progress=pb.OutputProgress(booking=key, output_tokens=state.output_tokens))
    for key in chunk.tombstones:
        yield pb.ReplicaSyncEvent(free=pb.FreeBooking(booking=key))
