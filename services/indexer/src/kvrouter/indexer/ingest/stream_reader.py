"""Reads the stream of a component into its index, and recovers from failures of NATS, stream and consumer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import structlog
from kvrouter.indexer.index.event_applier import EventApplier
from kvrouter.indexer.ingest.jetstream import AWAY, Delivery, DeliveryLost, DurableConsumer
from kvrouter.indexer.ingest.read_position import Position, Recreate, StreamView, is_behind, is_caught_up, plan
from kvrouter.net.backoff import Backoff

log = structlog.get_logger(component="indexer")

_WAIT_SECONDS = 1.0
_CHECK_SECONDS = 2.0
"""Time without a message after which stream and consumer are checked: a lost consumer delivers nothing either."""
_RETRY_SECONDS = (0.2, 2.0)  # first and longest pause
_TAKEN_AT_ONCE_NS = 25_000
"""Longest time to apply a message directly from the socket, as estimated. To read it takes as long, and the budget of
the client counts 50 µs for both."""


class Progress(msgspec.Struct, frozen=True):
    """How far the stream is applied."""

    position: Position | None = None
    """None before the stream was first viewed."""
    last_sequence: int = 0
    """Last sequence of the stream, as NATS last reported it."""
    caught_up: bool = False
    """Whether all messages in the stream as of the replica's start are applied."""
    checked_at: float | None = None
    """Time of the last report by NATS, seconds of the monotonic clock; None for never."""

    @property
    def applied(self) -> int:
        """Returns the sequence of the last message applied; 0 for none."""
        return self.position.applied if self.position else 0


@dataclass(eq=False)
class Ingest:
    """Keeps one index up to date with a stream. ``progress`` says how far it is."""

    name: str
    events: EventApplier
    consumer: DurableConsumer
    later: Callable[[StreamView], Awaitable[Position | None]] | None = None
    """Loads a snapshot newer than the index, and returns its position; None for no snapshots."""

    def __post_init__(self) -> None:
        self._target: int | None = None
        """Last sequence of the stream at the start; None before the stream was first viewed."""
        self._caught_up = asyncio.Event()
        self._last_data: bytes | None = None
        """Content of the last message applied; None if it is not known."""
        self._gone_after: int | None = None
        """Last position whose next messages were gone from the stream when later ones were delivered."""
        self._began = 0.0
        self._messages = 0
        self._log = log.bind(component_name=self.name)
        self.progress = Progress()
        self.backoff = Backoff(*_RETRY_SECONDS)
        """Counts consecutive failures, and gives the pause before the next attempt."""
        self.recreations = 0
        """How often the consumer was created, the first time included."""

    def start_from(self, position: Position) -> None:
        """Sets the position of a restored snapshot. Must be called before ``run``."""
        self.progress = Progress(position)

    async def run(self) -> None:
        """Reads until cancelled."""
        # A separate thread: applying must neither block the loop nor wait for a thread that queries use.
        thread = ThreadPoolExecutor(1, thread_name_prefix="apply")
        try:
            await self._keep_reading(thread)
        finally:
            # Waiting for the batch in progress would block the loop.
            thread.shutdown(wait=False)
            await self.consumer.close()

    async def _keep_reading(self, thread: ThreadPoolExecutor) -> None:
        backoff = self.backoff
        while True:
            try:
                await self._settle()
                if await self._read(thread):
                    self._note_recovery()
            except DeliveryLost as error:
                if not backoff.failures:
                    self._log.warning("ingest.delivery_lost", detail=str(error))
                self.consumer.forsake()
                # A single lost delivery is read again without a pause; repeated losses back off.
                pause = backoff.failed()
                if backoff.failures > 1:
                    await asyncio.sleep(pause)
            except AWAY as error:
                if not backoff.failures:
                    self._log.warning("stream.unreachable", error=repr(error))
                await asyncio.sleep(backoff.failed())

    def _note_recovery(self) -> None:
        if failures := self.backoff.succeeded():
            self._log.info("ingest.restarted", failures=failures)

    async def wait_caught_up(self) -> None:
        """Waits until all messages in the stream as of the replica's start are applied."""
        await self._caught_up.wait()

    async def _settle(self) -> None:
        """Moves the consumer to the message after the replica's position, unless it is there."""
        stream = await self.consumer.view_stream()
        position = self.progress.position
        if position is not None and self.later is not None and is_behind(position, stream):
            later = await self.later(stream)
            if later is not None and (later.identity != position.identity or later.applied > position.applied):
                position, self._last_data = later, None
        same = None
        if position is not None and self._last_data is not None:
            same = await self.consumer.holds(position.applied, self._last_data)
        consumer = await self.consumer.view()
        recreation = plan(position, stream, consumer, same_message=same)
        if position is None or consumer is None or recreation is not None:
            recreation = recreation or Recreate(1, "start")
            start = recreation.start_sequence
            consumer = await self.consumer.recreate(start)
            self.recreations += 1
            applied = max(start - 1, consumer.delivered_stream_sequence)
            if position is None or position.applied != applied:
                self._last_data = None
            position = Position(stream.identity, applied, consumer.created_unix_ns)
            self._log.info(
                "ingest.consumer_created",
                start_sequence=start,
                last_sequence=stream.last_sequence,
                reason=recreation.reason,
            )
        if self._target is None:
            self._target, self._began = stream.last_sequence, time.monotonic()
        self._advance(position, stream.last_sequence, consumer.pending)

    async def _read(self, thread: ThreadPoolExecutor) -> bool:
        """Reads until the stream must be viewed again (returns False) or no message arrives for 2 s (returns True)."""
        while not self.consumer.reconnected and time.monotonic() - (self.progress.checked_at or 0) < _CHECK_SECONDS:
            delivery = await self.consumer.fetch(_WAIT_SECONDS, self._apply_at_once)
            if delivery is None:
                await self.consumer.acknowledge_rest()
                continue
            if self._lacks_messages(delivery):
                self.consumer.forsake()
                return False
            position, messages = self.progress.position, delivery.messages
            if position is None:
                raise DeliveryLost("expected a position in the stream before the first delivery, found none")
            if rest := messages[self.events.apply_at_once(messages) :]:
                await asyncio.get_running_loop().run_in_executor(thread, self.events.apply, rest)
            self._note_applied(position, delivery)
        return not self.consumer.reconnected

    def _lacks_messages(self, delivery: Delivery) -> bool:
        """Returns whether messages before the end of a delivery are gone, so that a newer snapshot can help.

        True once for each position: the delivery is applied if it arrives again.
        """
        applied, messages = self.progress.applied, delivery.messages
        if self.later is None or messages[-1].sequence <= applied + len(messages) or self._gone_after == applied:
            return False
        self._gone_after = applied
        return True

    def _apply_at_once(self, delivery: Delivery) -> bool:
        """Applies a delivery of one message if that takes little time and none is missing. Returns whether it did."""
        position, messages = self.progress.position, delivery.messages
        if position is None or messages[-1].sequence != position.applied + 1:
            return False
        if not self.events.apply_at_once(messages, _TAKEN_AT_ONCE_NS):
            return False
        self._note_applied(position, delivery)
        return True

    def _note_applied(self, position: Position, delivery: Delivery) -> None:
        last = delivery.messages[-1]
        self._last_data = last.data
        self._messages += len(delivery.messages)
        position = Position(position.identity, last.sequence, position.consumer_created_unix_ns)
        self._advance(position, last.sequence + delivery.pending, delivery.pending)
        self.consumer.note_applied(delivery)
        if self.backoff.failures:
            self._note_recovery()

    def _advance(self, position: Position, last_sequence: int, pending: int) -> None:
        was_caught_up = self.progress.caught_up
        caught_up = was_caught_up or (
            self._target is not None and is_caught_up(self._target, position.applied, pending)
        )
        self.progress = Progress(position, last_sequence, caught_up, time.monotonic())
        if caught_up and not was_caught_up:
            self._caught_up.set()
            seconds = round(time.monotonic() - self._began, 3)
            self._log.info(
                "ingest.caught_up", messages=self._messages, stream_sequence=position.applied, seconds=seconds
            )
