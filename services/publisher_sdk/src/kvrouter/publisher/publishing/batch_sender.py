"""Sends the events of one rank in batches."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

from kvrouter.net.logs import get_logger
from kvrouter.publisher.events.batches import MAX_BATCH_BYTES
from kvrouter.publisher.events.blocks import NumberedEvent
from kvrouter.publisher.events.event_log import EventLog
from kvrouter.publisher.events.native_event_log import encode_batch
from kvrouter.publisher.events.rank_state import RankState
from kvrouter.publisher.publishing.transport import MessageRefused, Transport, TransportAway, check_cancelled
from kvrouter.v1.events_pb2 import KvEventBatch
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = get_logger(__name__)

_TRIES_BEFORE_WARNING = 4


class BatchSender:
    """Sends batches one at a time, and heartbeats while there are no events."""

    def __init__(
        self,
        *,
        subject: str,
        head: KvEventBatch,
        state: RankState,
        events: EventLog,
        lock: threading.RLock,
        kept: Callable[[], Awaitable[None]],
    ) -> None:
        """Args:
        subject: Where to send.
        head: Fields that all batches of the rank have.
        state: The rank's state, for heartbeats.
        events: The rank's events.
        lock: Guards state and events.
        kept: Waits until all recorded events are in the journal.
        """  # noqa: D205
        self.batches_sent = self.heartbeats_sent = self.bytes_sent = self.retries = self.refused = 0
        self._subject = subject
        self._head = head
        self._rank = head.dp_rank
        self._state = state
        self._events = events
        self._lock = lock
        self._kept = kept
        # The stream drops a message whose id it has seen, whoever sent that one: other workers must not guess the ids.
        self._secret = secrets.token_hex(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting = asyncio.Event()
        self._sent = asyncio.Condition()
        self._in_flight: list[NumberedEvent] = []
        self._dropped_reported = 0
        self._waits_since: float | None = None
        self._waits_for = ""

    @property
    def waiting_seconds(self) -> float:
        """Time for which the current batch could not be sent, seconds; 0 if none waits."""
        return time.monotonic() - self._waits_since if self._waits_since is not None else 0.0

    @property
    def waiting_reason(self) -> str:
        """Error of its last attempt; empty if none waits."""
        return self._waits_for

    def unsent(self) -> list[NumberedEvent]:
        """Returns the events that may not have been sent, oldest first."""
        return [*self._in_flight, *self._events.waiting()]

    def add(self, events: Sequence[NumberedEvent]) -> None:
        """Records events to send. The caller owns the lock."""
        idle = not self._events.unsent
        self._events.extend(events)
        if idle and events and self._loop is not None:
            self._loop.call_soon_threadsafe(self._waiting.set)

    async def run(
        self, transport: Transport, *, heartbeat_seconds: float, max_batch_bytes: Callable[[], int] | None = None
    ) -> None:
        """Sends events in batches of at most ``max_batch_bytes`` until cancelled.

        A batch is sent again until the transport accepts it. Events that are recorded meanwhile go into the next one.
        At the start, and after each ``heartbeat_seconds`` without events, a heartbeat reports cursor and digest.
        """
        self._loop = asyncio.get_running_loop()
        self._waiting.set()
        heartbeat_due = True
        try:
            while True:
                limit = min(MAX_BATCH_BYTES, max_batch_bytes() if max_batch_bytes else MAX_BATCH_BYTES)
                events = self._take(limit)
                if events or heartbeat_due:
                    await self._deliver(transport, events)
                async with self._sent:
                    self._in_flight = []
                    self._sent.notify_all()
                heartbeat_due = not await self._recorded_within(heartbeat_seconds)
        finally:
            self._loop = None

    async def flush(self) -> None:
        """Waits until all recorded events are sent, which needs ``run`` to be running."""
        async with self._sent:
            await self._sent.wait_for(lambda: not self._events.unsent and not self._in_flight)

    async def _recorded_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._waiting.wait()
        except TimeoutError:
            return False
        return True

    def _take(self, max_bytes: int) -> list[NumberedEvent]:
        with self._lock:
            events = self._events.take(max_bytes)
            self._in_flight = events
            if not events:
                self._waiting.clear()
            dropped = self._events.dropped
        if dropped > self._dropped_reported:
            log.warning("publish.events_dropped", rank=self._rank, events=dropped - self._dropped_reported)
            self._dropped_reported = dropped
        return events

    def encode(self, events: Sequence[NumberedEvent]) -> bytes:
        """Returns a batch of consecutive events, or a heartbeat if there are none."""
        if events:
            next_event_id, digest = events[-1].event_id + 1, events[-1].digest
        else:
            with self._lock:
                next_event_id, digest = self._state.next_event_id, self._state.digest
        head = KvEventBatch(next_event_id=next_event_id, digest=digest, published_unix_ns=time.time_ns())
        head.MergeFrom(self._head)
        return encode_batch(head, events)

    async def _deliver(self, transport: Transport, events: list[NumberedEvent]) -> None:
        payload = self.encode(events)
        await self._kept()
        message_id = None
        if events:
            # Includes the last event's id: a relay that resumes may send events again in batches of other sizes.
            span = f"{events[0].event_id}-{events[-1].event_id}"
            message_id = f"{self._secret}.{span}"
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(TransportAway),
                wait=wait_random_exponential(multiplier=0.1, max=2),
                before_sleep=self._note_retry,
            ):
                with attempt:
                    try:
                        await transport.send(self._subject, payload, message_id)
                    finally:
                        check_cancelled()
        except MessageRefused as error:
            self._end_wait()
            self.refused += len(events)
            log.error("publish.rejected", rank=self._rank, events=len(events), bytes=len(payload), error=str(error))
            return
        self._end_wait()
        self.bytes_sent += len(payload)
        if events:
            self.batches_sent += 1
        else:
            self.heartbeats_sent += 1

    def _note_retry(self, state: RetryCallState) -> None:
        self.retries += 1
        self._waits_for = str(state.outcome.exception()) if state.outcome is not None else ""
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        # The first attempts may fail while the connection is being made, which is not worth a warning.
        if state.attempt_number == _TRIES_BEFORE_WARNING:
            log.warning(
                "publish.delayed",
                rank=self._rank,
                error=self._waits_for,
                unsent_events=self._events.unsent,
                consequence="events are buffered, and Indexers read the rank over gRPC",
            )

    def _end_wait(self) -> None:
        if self._waits_since is None:
            return
        seconds = time.monotonic() - self._waits_since
        self._waits_since, self._waits_for = None, ""
        log.info("publish.recovered", rank=self._rank, seconds=round(seconds, 1))
