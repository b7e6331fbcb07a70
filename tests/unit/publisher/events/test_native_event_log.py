"""The event log and the batches of the Rust core equal those of the reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvrouter.core import EVENT_LOG
from kvrouter.publisher.errors import EventsGone
from kvrouter.publisher.events import batches
from kvrouter.publisher.events.blocks import NumberedEvent
from kvrouter.publisher.events.event_log import EventLog
from kvrouter.publisher.events.native_event_log import NativeEventLog, encode_batch, make_event_log
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch

pytestmark = pytest.mark.skipif(EVENT_LOG is None, reason="the native core is not built")

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(0, 40), max_size=5)),
        st.tuples(st.just("take"), st.integers(1, 80)),
        st.tuples(st.just("since"), st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 80))),
    ),
    max_size=40,
)


def since(log: EventLog, event_id: int, until: int, max_bytes: int) -> list[list[NumberedEvent]] | str:
    try:
        return list(log.since(event_id, until, max_bytes))
    except EventsGone as gone:
        return str(gone)


@given(STEPS, st.integers(1, 12), st.integers(40, 200))
def test_any_steps_have_the_same_outcome(steps: list[tuple[str, object]], max_events: int, max_bytes: int) -> None:
    one, other, number = EventLog(max_events, max_bytes), NativeEventLog(max_events, max_bytes), 0
    for step in steps:
        match step:
            case ("extend", list(sizes)):
                events = [
                    NumberedEvent(number + place, bytes([place]) * size, place) for place, size in enumerate(sizes)
                ]
                number += len(events)
                one.extend(events)
                other.extend(events)
            case ("take", int(size)):
                assert one.take(size) == other.take(size)
            case ("since", tuple(arguments)):
                assert since(one, *arguments) == since(other, *arguments)
        assert one.waiting() == other.waiting()
        assert (one.unsent, one.unsent_bytes, one.dropped) == (other.unsent, other.unsent_bytes, other.dropped)


@given(
    st.builds(
        KvEventBatch,
        worker_id=U64,
        dp_rank=U32,
        incarnation=U64,
        block_size=st.integers(1, (1 << 32) - 1),
        copy_counting=st.sampled_from([CopyCounting.COPY_COUNTING_COUNTED, CopyCounting.COPY_COUNTING_SET]),
        next_event_id=U64,
        digest=U64,
        published_unix_ns=U64,
    ),
    st.lists(st.builds(KvEvent, event_id=U64), max_size=4),
)
def test_batches_have_the_same_content(head: KvEventBatch, events: list[KvEvent]) -> None:
    numbered = [NumberedEvent(event.event_id, event.SerializeToString(), 0) for event in events]
    expected = KvEventBatch.FromString(batches.encode_batch(head, numbered))
    encoded = encode_batch(head, numbered)
    assert KvEventBatch.FromString(encoded) == expected
    assert expected.events == events


def test_publishers_use_the_core() -> None:
    assert isinstance(make_event_log(1, 1), NativeEventLog)
