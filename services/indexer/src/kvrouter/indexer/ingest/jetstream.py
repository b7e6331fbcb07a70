"""A replica's durable pull consumer on a component's event stream. It does all JetStream calls of the ingest.

The client library's own ``fetch`` waits until all requested messages have arrived, so that a quiet stream must be read
with a request, a task and a timer for each message. This cost more than applying the message. ``Pull`` sends one
request for many messages, each taken as soon as it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import nats.errors
from kvrouter.indexer.index.messages import StreamMessage
from kvrouter.indexer.ingest.read_position import ConsumerView, StreamIdentity, StreamView
from kvrouter.net.nats.client import ReceiveAtOnce, TolerantClient
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1.names import ComponentName
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import (
    DEFAULT_PREFIX,
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    Header,
    StatusCode,
    StreamInfo,
)
from nats.js.errors import APIError, NotFoundError

REQUESTED_MESSAGES = 64
"""Messages per request. Bounds the arrivals during the application of earlier messages."""

# The server ends a request before the client stops waiting for it, so that no request outlives its fetch.
_MARGIN_SECONDS = 0.05
_REQUEST_ENDED = frozenset({StatusCode.NO_MESSAGES, StatusCode.REQUEST_TIMEOUT})


class Pull:
    """Messages of one durable consumer. Call ``open`` first; one task calls ``take``."""

    def __init__(self, connection: TolerantClient, stream: str, durable: str) -> None:
        self._connection = connection
        self._subject = f"{DEFAULT_PREFIX}.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = connection.new_inbox()
        self._reply = ""
        """Where the answers to the last request go. Each request has a subject of its own, since the end of one may
        arrive after the next one was sent: taken for the end of that one, it would cause a further request for good."""
        self._requests = 0
        self._subscription: Subscription | None = None
        self._arrived: deque[Msg] = deque()
        self._filled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_once: ReceiveAtOnce | None = None
        self._outstanding = 0
        """Messages still due for the last request."""
        self._end: asyncio.TimerHandle | None = None
        """When the last request has ended."""

    async def open(self) -> None:
        """Subscribes to the messages.

        Raises:
            nats.errors.Error: the connection is closed.
        """
        self._subscription = await self._connection.subscribe(f"{self._inbox}.*", cb=self._receive)
        self._connection.receive_at_once(self._subscription, self._receive_at_once)

    async def close(self) -> None:
        """Unsubscribes. The server drops its remaining messages for the last request.

        Raises:
            nats.errors.Error: the connection is closed.
        """
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def take(self, wait_seconds: float, at_once: ReceiveAtOnce | None = None) -> list[Msg]:
        """Returns all received messages, after waiting for the first; none after ``wait_seconds``.

        While it waits, ``at_once`` may take each message, and returns whether it did. If it takes all that were
        requested, none are returned. When it returns none, the server has no request either, and sends nothing until
        the next call.

        Raises:
            nats.errors.Error, OSError: the connection is closed, or there is no such consumer.
        """
        if not self._arrived:
            if self._outstanding <= 0:
                await self._request(wait_seconds)
            if not self._arrived:
                self._at_once, self._filled = at_once, asyncio.get_running_loop().create_future()
                await self._filled
        return self._received()

    async def _request(self, wait_seconds: float) -> None:
        expires_ns = round(max(wait_seconds - _MARGIN_SECONDS, wait_seconds / 2) * 1e9)
        self._outstanding = REQUESTED_MESSAGES
        self._requests += 1
        self._reply = f"{self._inbox}.{self._requests}"
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(wait_seconds, self._expire)
        request = json.dumps({"batch": REQUESTED_MESSAGES, "expires": expires_ns}).encode()
        await self._connection.publish(self._subject, request, self._reply)

    def _expire(self) -> None:
        self._outstanding = 0
        self._wake()

    async def _receive(self, message: Msg) -> None:
        if message.headers and message.subject != self._reply and _status(message) is not None:
            return
        # Any client can publish to the inbox. What does not fit is missed by its number if it was a delivery.
        if len(self._arrived) < 2 * REQUESTED_MESSAGES:
            self._arrived.append(message)
        self._wake()

    def _receive_at_once(self, subject: str, reply: str, data: bytes) -> bool:
        if self._at_once is None or self._filled.done() or not self._at_once(subject, reply, data):
            return False
        self._outstanding -= 1
        if self._outstanding <= 0:
            self._wake()
        return True

    def _wake(self) -> None:
        if not self._filled.done():
            self._filled.set_result(None)

    def _received(self) -> list[Msg]:
        """Takes the received messages, up to an error status, which is raised once it is the first."""
        messages: list[Msg] = []
        while self._arrived:
            message = self._arrived.popleft()
            if not message.headers or (status := _status(message)) is None:
                messages.append(message)
                self._outstanding -= 1
                continue
            self._outstanding = 0
            if status in _REQUEST_ENDED:
                continue
            if messages:
                self._arrived.appendleft(message)
                break
            APIError.from_msg(message)  # raises
        return messages


def _status(message: Msg) -> str | None:
    return (message.headers or {}).get(Header.STATUS)


AWAY = (nats.errors.Error, TimeoutError, OSError)
"""Errors of calls when NATS is unreachable, or a stream or consumer is gone. Retry after viewing the stream again."""

_MAX_ACK_PENDING = 4 * REQUESTED_MESSAGES
_ACKNOWLEDGED_TOGETHER = REQUESTED_MESSAGES
# Longer than it takes to apply all unacknowledged messages. A second delivery is harmless, but wasted work.
_ACK_WAIT_SECONDS = 60.0
# A replica that was away for longer recreates its consumer anyway, so the server need not keep it.
_INACTIVE_SECONDS = 600.0
_CLOSE_SECONDS = 1.0
_TOKENS_WITHOUT_DOMAIN = 9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DeliveryLost(Exception):
    """Raised when a delivered message did not arrive."""


class Delivery(msgspec.Struct, frozen=True):
    """Consecutive messages, in stream order."""

    messages: list[StreamMessage]
    reply: str
    """Reply subject of the last of them, to acknowledge all."""
    pending: int
    """Number of messages in the stream after it."""


class DurableConsumer:
    """The durable consumer of one replica on the stream of one component."""

    def __init__(self, connection: TolerantClient, component: ComponentName, replica_id: str) -> None:
        self.connection = connection
        """The connection to NATS."""
        self._js = connection.jetstream()
        self._component = component
        self._durable = f"indexer-{replica_id}"
        self._pull: Pull | None = None
        self._last_delivery = 0
        """Number of the last delivery: a consumer numbers its deliveries from 1."""
        self._unacknowledged: str | None = None
        self._unacknowledged_count = 0
        self._lost = True
        self._reconnects = self.connection.stats["reconnects"]

    @property
    def reconnected(self) -> bool:
        """Returns whether the client reconnected since the last ``view_stream``."""
        return bool(self.connection.stats["reconnects"] != self._reconnects)

    async def view_stream(self) -> StreamView:
        """Returns the state of the stream. Creates the stream if it is missing.

        Raises:
            AWAY: NATS does not answer.
        """
        self._reconnects = self.connection.stats["reconnects"]
        info = await ensure_stream(self._js, self._component)
        identity = StreamIdentity(self._component.stream, created_unix_ns(info))
        return StreamView(identity, info.state.last_seq, info.state.first_seq)

    async def view(self) -> ConsumerView | None:
        """Returns the state of the consumer; None if there is none.

        Raises:
            AWAY: NATS does not answer.
        """
        if self._lost:
            return None
        try:
            info = await self._js.consumer_info(self._component.stream, self._durable)
        except NotFoundError:
            return None
        return _consumer_view(info)

    def forsake(self) -> None:
        """Marks the consumer as lost, so that ``view`` returns None and it is recreated."""
        self._lost = True

    async def holds(self, sequence: int, data: bytes) -> bool | None:
        """Returns whether the message at a sequence has this content; None if it is no longer in the stream.

        Raises:
            AWAY: NATS does not answer.
        """
        try:
            message = await self._js.get_msg(self._component.stream, sequence)
        except NotFoundError:
            return None
        return (message.data or b"") == data

    async def recreate(self, start_sequence: int) -> ConsumerView:
        """Replaces the consumer by one from another sequence, which an existing consumer cannot change.

        Raises:
            AWAY: NATS does not answer.
        """
        await self._unsubscribe()
        stream = self._component.stream
        with contextlib.suppress(NotFoundError):
            await self._js.delete_consumer(stream, self._durable)
        info = await self._js.add_consumer(
            stream,
            ConsumerConfig(
                durable_name=self._durable,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=start_sequence,
                ack_policy=AckPolicy.ALL,
                ack_wait=_ACK_WAIT_SECONDS,
                max_ack_pending=_MAX_ACK_PENDING,
                inactive_threshold=_INACTIVE_SECONDS,
            ),
        )
        self._pull = Pull(self.connection, stream, self._durable)
        await self._pull.open()
        self._unacknowledged, self._unacknowledged_count = None, 0
        self._last_delivery = 0
        self._lost = False
        return _consumer_view(info)

    async def fetch(self, wait_seconds: float, at_once: Callable[[Delivery], bool]) -> Delivery | None:
        """Returns the next messages; None if none arrived within ``wait_seconds``, or ``at_once`` applied them.

        Args:
            wait_seconds: Time to wait for the first message.
            at_once: Applies a delivery of one message that arrives meanwhile, and returns whether it did.

        Raises:
            DeliveryLost: a delivery is missing; the consumer must be recreated.
            AWAY: NATS does not answer, or the consumer is gone.
        """
        if self._pull is None:
            raise DeliveryLost("expected a consumer, found none; it is recreated")
        if self._unacknowledged_count >= _ACKNOWLEDGED_TOGETHER:
            await self.acknowledge_rest()
        messages = await self._pull.take(wait_seconds, partial(self._offer, at_once))
        if not messages:
            return None
        delivered: list[StreamMessage] = []
        for message in messages:
            sequence, pending = self._place(message.reply)
            self._last_delivery += 1
            delivered.append(StreamMessage(message.subject, sequence, message.data))
        return Delivery(delivered, messages[-1].reply, pending)

    def _offer(self, at_once: Callable[[Delivery], bool], subject: str, reply: str, data: bytes) -> bool:
        sequence, pending = self._place(reply)
        is_applied = at_once(Delivery([StreamMessage(subject, sequence, data)], reply, pending))
        self._last_delivery += is_applied
        return is_applied

    def _place(self, reply: str) -> tuple[int, int]:
        """Returns the stream sequence of the next delivery and the number of messages after it."""
        try:
            sequence, number, pending = delivery_of(reply)
        except (ValueError, IndexError) as error:
            # Any client can publish to the inbox of the deliveries.
            raise DeliveryLost(f"expected a delivery, received another message: {error!r}") from None
        # A lost delivery would show as a gap in a rank's events, although the stream still has the message.
        if number != self._last_delivery + 1:
            raise DeliveryLost(f"expected delivery {self._last_delivery + 1}, received {number}")
        return sequence, pending

    def note_applied(self, delivery: Delivery) -> None:
        """Marks all messages up to the end of a delivery as applied. ``fetch`` tells the server about many together."""
        self._unacknowledged = delivery.reply
        self._unacknowledged_count += len(delivery.messages)

    async def acknowledge_rest(self) -> None:
        """Tells the server about all applied messages new to it.

        Raises:
            AWAY: the connection is lost; the next acknowledgement includes this one.
        """
        reply, self._unacknowledged, self._unacknowledged_count = self._unacknowledged, None, 0
        if reply is not None:
            await self.connection.publish(reply)

    async def close(self) -> None:
        """Deletes the consumer. If NATS is unreachable, the server deletes it after 10 minutes without use."""
        with contextlib.suppress(*AWAY):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._unsubscribe()
                await self._js.delete_consumer(self._component.stream, self._durable)

    async def _unsubscribe(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            with contextlib.suppress(*AWAY):
                await pull.close()


def delivery_of(reply: str) -> tuple[int, int, int]:
    """Returns the stream sequence of a delivery, its number, and the number of later messages, from its reply subject.

    The library parses the other tokens too, which takes longer than to apply a heartbeat.

    Raises:
        ValueError, IndexError: it is no reply subject of a delivery.
    """
    if not reply.startswith("$JS.ACK."):
        raise ValueError(reply)
    tokens = reply.split(".")
    # Domain and account come before the stream.
    first = 2 if len(tokens) == _TOKENS_WITHOUT_DOMAIN else 4
    return int(tokens[first + 3]), int(tokens[first + 4]), int(tokens[first + 6])


def _consumer_view(info: ConsumerInfo) -> ConsumerView:
    delivered = info.delivered.stream_seq if info.delivered else 0
    return ConsumerView(_unix_ns(info.created), delivered, info.num_pending or 0)


def created_unix_ns(info: StreamInfo) -> int:
    """Returns the creation time of a stream, nanoseconds since 1970 in whole microseconds; 0 if unknown."""
    return _unix_ns(info.created) if info.created else 0


def _unix_ns(time: datetime) -> int:
    # Integers, because identities are compared and a float of seconds since 1970 is exact to about 0.2 µs only.
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000
