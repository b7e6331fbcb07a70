"""Sends the events of one rank in batches."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from kvrouter.core.interface import MAX_BATCH_BYTES, EventRecorder
from kvrouter.net.backoff import Backoff
from kvrouter.net.logs import get_logger
from kvrouter.net.nats.client import or_cancelled
from kvrouter.net.ticks import seconds_to_send
from kvrouter.publisher.publishing.transport import MessageRefused, Transport, TransportAway

log = get_logger(__name__)

_TRIES_BEFORE_WARNING = 4
_RETRY_SECONDS = (0.1, 2.0)
"""First and longest pause after a failed attempt, seconds."""
_REPEATED = (1.72, 1.98)
"""Time before a heartbeat is repeated, in heartbeat intervals. By default at most two when it is aligned, too."""


@dataclass(eq=False)
class BatchSender:
    """Sends batches one at a time, and heartbeats while there are no events."""

    _: KW_ONLY
    subject: str
    """Where to send."""
    dp_rank: int
    """Data-parallel rank."""
    recorder: EventRecorder
    """The rank's events."""
    lock: threading.RLock
    """Guards the recorder."""

    def __post_init__(self) -> None:
        self.batches_sent = self.heartbeats_sent = self.bytes_sent = self.retries = self.refused = 0
        # The stream drops a message whose id it has seen, whoever sent that one: other workers must not guess the ids.
        self._secret = secrets.token_hex(8)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._recorded = asyncio.Event()
        self._sleeps = False
        self._sent = asyncio.Condition()
        counts = self.recorder.counts()
        self._taken_id = self._sent_id = counts.next_event_id - counts.unsent_events
        self._waits_since: float | None = None
        self.waiting_reason = ""
        """Error of its last attempt; empty if none waits."""

    @property
    def waiting_seconds(self) -> float:
        """Time for which the current batch could not be sent, seconds; 0 if none waits."""
        return time.monotonic() - self._waits_since if self._waits_since is not None else 0.0

    def wake(self) -> None:
        """Announces new events. The caller owns the lock."""
        if self._sleeps and self._loop is not None:
            self._sleeps = False
            self._loop.call_soon_threadsafe(self._recorded.set)

    async def run(
        self, transport: Transport, *, heartbeat_seconds: float, max_batch_bytes: Callable[[], int] | None = None
    ) -> None:
        """Sends events in batches of at most ``max_batch_bytes`` until cancelled.

        A batch is sent again until the transport accepts it. Events recorded meanwhile go into the next one.
        At the start, and after ``heartbeat_seconds`` without events, a heartbeat reports cursor and digest. While there
        are none, it is repeated after nearly twice that time: a rank is silent after three times that time.
        """
        self._loop = asyncio.get_running_loop()
        self._recorded.set()
        heartbeat_due = True
        try:
            while True:
                first, after, payload = self._take(max_batch_bytes() if max_batch_bytes else MAX_BATCH_BYTES)
                if after > first or heartbeat_due:
                    await self._deliver(transport, payload, first, after)
                interval = heartbeat_seconds
                if after == first:
                    interval = seconds_to_send(heartbeat_seconds * random.uniform(*_REPEATED))
                async with self._sent:
                    self._sent_id = after
                    self._sent.notify_all()
                heartbeat_due = not await self._recorded_within(interval)
        finally:
            self._loop = None

    async def flush(self) -> None:
        """Waits until all recorded events are sent, which needs ``run`` to be running."""
        async with self._sent:
            await self._sent.wait_for(self._all_sent)

    def _all_sent(self) -> bool:
        with self.lock:
            return self._sent_id == self._taken_id and not self.recorder.counts().unsent_events

    async def _recorded_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._recorded.wait()
        except TimeoutError:
            return False
        return True

    def _take(self, max_bytes: int) -> tuple[int, int, bytes]:
        """Takes a batch, or a heartbeat if there are no events; see ``EventRecorder.take_batch``."""
        with self.lock:
            first, after, payload = self.recorder.take_batch(max_bytes)
            if first == after:
                self._recorded.clear()
                self._sleeps = True
        if first > self._taken_id:
            log.warning("publish.events_dropped", rank=self.dp_rank, events=first - self._taken_id)
        self._taken_id = after
        return first, after, payload

    async def _deliver(self, transport: Transport, payload: bytes, first: int, after: int) -> None:
        events = after - first
        # Includes the last event's id: a relay that resumes may send events again in batches of other sizes.
        message_id = f"{self._secret}.{first}-{after - 1}" if events else None
        backoff = Backoff(*_RETRY_SECONDS)
        try:
            while True:
                try:
                    await or_cancelled(transport.send(self.subject, payload, message_id))
                    break
                except TransportAway as error:
                    pause = backoff.failed()
                    self._note_retry(error, backoff.failures)
                    await asyncio.sleep(pause)
        except MessageRefused as error:
            self._end_wait()
            self.refused += events
            log.error("publish.rejected", rank=self.dp_rank, events=events, bytes=len(payload), error=str(error))
            return
        self._end_wait()
        self.bytes_sent += len(payload)
        if events:
            self.batches_sent += 1
        else:
            self.heartbeats_sent += 1

    def _note_retry(self, error: TransportAway, failures: int) -> None:
        self.retries += 1
        self.waiting_reason = str(error)
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        # The first attempts may fail while the connection is being made, which is not worth a warning.
        if failures == _TRIES_BEFORE_WARNING:
            log.warning(
                "publish.delayed",
                rank=self.dp_rank,
                error=self.waiting_reason,
                unsent_events=self.recorder.counts().unsent_events,
                consequence="events are buffered, and Indexers read the rank over gRPC",
            )

    def _end_wait(self) -> None:
        if self._waits_since is None:
            return
        seconds = time.monotonic() - self._waits_since
        self._waits_since, self.waiting_reason = None, ""
        log.info("publish.recovered", rank=self.dp_rank, seconds=round(seconds, 1))
