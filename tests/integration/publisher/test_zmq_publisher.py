"""An engine that publishes in vLLM's ZMQ format, as a subscriber and a requester of replays see it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from kvrouter.core import Scope
from kvrouter.engines.events.vllm_sglang_events import Cleared, Event, Removed, Stored, UndecodableEvent, decode_batch
from kvrouter.engines.events.zmq_frames import EventMessage, encode_sequence, read_published, read_replayed
from kvrouter.engines.events.zmq_publisher import ZmqPublisher
from kvrouter.publisher.errors import InvalidConfig, InvalidEvent
from kvrouter.v1.common_pb2 import Tier

from ...captures import read_capture

BLOCK = 4


class Consumer:
    """A subscriber that also requests replays."""

    def __init__(self, context: zmq.Context[Any], events: str, replays: str) -> None:
        self._context = context
        self._replays = replays
        self._events = context.socket(zmq.SUB)
        monitor = self._events.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
        self._events.connect(events)
        self._events.subscribe(b"")
        assert monitor.poll(10_000)
        self._events.disable_monitor()
        self.first = 0
        """Sequence of the first message of the test."""

    def is_subscribed(self) -> bool:
        return bool(self._events.poll(10))

    def receive(self) -> EventMessage:
        assert self._events.poll(10_000)
        message = read_published(self._events.recv_multipart())
        assert message is not None
        return message

    def replay(self, *frames: bytes) -> list[EventMessage]:
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(self._replays)
            socket.send_multipart(frames)
            messages = []
            while True:
                assert socket.poll(10_000)
                message = read_replayed(socket.recv_multipart())
                if message is None:
                    return messages
                messages.append(message)


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@contextlib.contextmanager
def publishing(context: zmq.Context[Any], **options: Any) -> Iterator[tuple[ZmqPublisher, Consumer]]:
    free = "tcp://127.0.0.1:*"
    with ZmqPublisher(free, replay_endpoint=free, block_size=BLOCK, **options) as publisher:
        consumer = Consumer(context, publisher.endpoint, publisher.replay_endpoint)
        # A subscription takes effect shortly after the connection.
        warm_ups = itertools.count(1)
        while not consumer.is_subscribed():
            publisher.cleared()
            consumer.first = next(warm_ups)
        while consumer.receive().sequence != consumer.first - 1:
            pass
        yield publisher, consumer


def events(message: EventMessage) -> list[Event | UndecodableEvent]:
    return list(decode_batch(message.payload).events)


def test_reports_are_messages_with_sequences(context: zmq.Context[Any]) -> None:
    with publishing(context, dp_rank=3) as (publisher, consumer):
        publisher.stored(token_ids=range(8), engine_hashes=[1, -2], parent=None)
        publisher.removed([1], tier=Tier.TIER_DISK)
        publisher.cleared()
        messages = [consumer.receive() for _ in range(3)]
        assert [message.sequence - consumer.first for message in messages] == [0, 1, 2]
        assert decode_batch(messages[0].payload).dp_rank == 3
        (store,), (removal,), (clear,) = map(events, messages)
        assert isinstance(store, Stored)
        assert (store.block_hashes, store.token_ids) == ([1, (1 << 64) - 2], list(range(8)))
        assert removal == Removed([1], 0, Tier.TIER_DISK, 0, False)
        assert clear == Cleared()
        assert consumer.replay(b"", encode_sequence(consumer.first + 1)) == messages[1:]
        assert consumer.replay(b"", encode_sequence(consumer.first + 3)) == []


def test_a_step_is_one_message(context: zmq.Context[Any]) -> None:
    with publishing(context) as (publisher, consumer):
        with publisher.batch():
            pass
        with publisher.batch():
            publisher.stored(token_ids=range(4), engine_hashes=[1])
            publisher.removed([1])
        message = consumer.receive()
        assert (message.sequence, len(events(message))) == (consumer.first, 2)


def test_scopes_and_content_are_untyped_keys(context: zmq.Context[Any]) -> None:
    with publishing(context) as (publisher, consumer):
        scope = Scope(lora_name="adapter", cache_salt="salt")
        publisher.stored(
            token_ids=range(8), engine_hashes=[1, 2], scope=scope, multimodal=[(1, "image"), (1, b"embedding")]
        )
        publisher.stored(token_ids=range(4), engine_hashes=[3], parent=2, scope=scope)
        (first,), (second,) = events(consumer.receive()), events(consumer.receive())
        assert isinstance(first, Stored)
        assert isinstance(second, Stored)
        assert first.lora_name == "adapter"
        assert first.extra_keys == [["adapter", "salt"], ["adapter", ["image", 0], b"embedding"]]
        assert second.extra_keys == [["adapter"]]


def test_only_the_newest_messages_are_repeated(context: zmq.Context[Any]) -> None:
    with publishing(context, buffer_steps=2) as (publisher, consumer):
        for number in range(5):
            publisher.removed([number])
        repeated = consumer.replay(b"", encode_sequence(0))
        assert [message.sequence - consumer.first for message in repeated] == [3, 4]


def test_a_long_replay_is_whole(context: zmq.Context[Any]) -> None:
    with publishing(context) as (publisher, consumer):
        for number in range(5000):
            publisher.removed([number])
        assert len(consumer.replay(b"", encode_sequence(consumer.first))) == 5000


def test_a_malformed_request_costs_nothing(context: zmq.Context[Any]) -> None:
    with publishing(context) as (publisher, consumer):
        publisher.cleared()
        with context.socket(zmq.DEALER) as socket:
            socket.connect(consumer._replays)
            for frames in ([b"x"], [b"", b"short"], [b"", b"", b"", b""]):
                socket.send_multipart(frames)
            socket.send_multipart([b"", encode_sequence(consumer.first)])
            assert socket.poll(10_000)
            assert read_replayed(socket.recv_multipart()) == consumer.receive()


def test_threads_report_together(context: zmq.Context[Any]) -> None:
    with publishing(context) as (publisher, consumer):
        threads = [
            threading.Thread(target=lambda: [publisher.removed([number]) for number in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert [consumer.receive().sequence - consumer.first for _ in range(400)] == list(range(400))
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    "report",
    [
        {"engine_hashes": [1]},
        {"engine_hashes": ["text"], "token_ids": range(4)},
        {"engine_hashes": [1], "token_ids": [1, 2, 3, 1 << 32]},
        {"engine_hashes": [1], "token_ids": [1, 2, 3, None]},
        {"engine_hashes": [1], "token_ids": range(4), "tier": 99},
        {"engine_hashes": [1], "token_ids": range(4), "multimodal": [(1, "image")]},
    ],
    ids=str,
)
def test_a_malformed_report_is_an_invalid_event(context: zmq.Context[Any], report: dict[str, Any]) -> None:
    with publishing(context) as (publisher, consumer):
        with pytest.raises(InvalidEvent):
            publisher.stored(**({"token_ids": [1]} | report))
        assert consumer.replay(b"", encode_sequence(consumer.first)) == []


def test_an_address_in_use_is_named(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.PUB) as taken:
        taken.bind("tcp://127.0.0.1:*")
        address = taken.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        with pytest.raises(InvalidConfig, match=address), ZmqPublisher(address, block_size=BLOCK):
            pass


def test_a_publisher_connects_to_a_consumer_that_listens(context: zmq.Context[Any]) -> None:
    with context.socket(zmq.SUB) as consumer:
        consumer.subscribe(b"")
        consumer.bind("tcp://127.0.0.1:*")
        address = consumer.getsockopt_string(zmq.LAST_ENDPOINT)
        with ZmqPublisher(address, connects=True, block_size=BLOCK) as publisher:
            while not consumer.poll(10):  # The first messages may be lost.
                publisher.cleared()
            message = read_published(consumer.recv_multipart())
            assert message is not None
            assert events(message) == [Cleared()]


def test_a_block_has_tokens() -> None:
    with pytest.raises(InvalidConfig, match="block_size"):
        ZmqPublisher("tcp://127.0.0.1:1", block_size=0)


@pytest.mark.parametrize(
    "scope", [Scope(), Scope(lora_name="my-lora"), Scope(cache_salt="tenant-42")], ids=["plain", "adapter", "salt"]
)
def test_events_have_the_fields_of_a_recorded_vllm(context: zmq.Context[Any], scope: Scope) -> None:
    recorded = [msgspec.msgpack.decode(frames[2]) for frames in read_capture("capture_vllm.bin")]
    stores = [event for _, events, _ in recorded for event in events if event["type"] == "BlockStored"]
    removals = [event for _, events, _ in recorded for event in events if event["type"] == "BlockRemoved"]
    keys = [scope.lora_name] * bool(scope.lora_name) + [scope.cache_salt] * bool(scope.cache_salt)
    like = next(each for each in stores if (each["extra_keys"][0] or []) == keys)
    tokens = list(range(len(like["block_hashes"]) * BLOCK))
    with publishing(context) as (publisher, consumer):
        publisher.stored(token_ids=tokens, engine_hashes=like["block_hashes"], scope=scope)
        publisher.removed(removals[0]["block_hashes"])
        own = [msgspec.msgpack.decode(consumer.receive().payload)[1][0] for _ in range(2)]
    # The number of an adapter is deprecated; its name counts.
    assert own == [like | {"token_ids": tokens, "block_size": BLOCK, "lora_id": None}, removals[0]]
    assert [list(event) for event in own] == [list(like), list(removals[0])]


OFFLOADED = bytes.fromhex(
    "93cb3ff80000000000009289a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107b1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e61"
    "6d65c0a967726f75705f6964780084a474797065ac426c6f636b52656d6f766564ac626c6f636b5f686173686573920708a66d656469756da3"
    "435055a967726f75705f6964780000"
)
"""A message of the event classes of vLLM 0.32 with the values that its offloading connector gives them, built from its
source, not recorded: a block stored in host memory, by its hash alone, and two removed there."""


def test_offloaded_blocks_are_published_as_vllm_does(context: zmq.Context[Any]) -> None:
    with publishing(context, dp_rank=0) as (publisher, consumer):
        with publisher.batch():
            publisher.stored_in_tier([7], tier=Tier.TIER_HOST)
            publisher.removed([7, 8], tier=Tier.TIER_HOST)
        _, ours, _ = msgspec.msgpack.decode(consumer.receive().payload)
        _, theirs, _ = msgspec.msgpack.decode(OFFLOADED)
        assert ours == theirs
        assert [list(event) for event in ours] == [list(event) for event in theirs], "in the same order"
    store, removal = decode_batch(OFFLOADED).events
    assert isinstance(store, Stored)
    assert (store.block_hashes, store.token_ids, store.block_size, store.tier) == ([7], [], 0, Tier.TIER_HOST)
    assert removal == Removed([7, 8], 0, Tier.TIER_HOST, 0, False)
