from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import EventBatch
from kvrouter.indexer.index.messages import Refusal, rank_of_subject, validate
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch
from kvrouter.v1.names import ComponentName

COMPONENT = ComponentName("ns", "decode")
SUBJECT = COMPONENT.events_subject(0xABC, 3)


def batch(worker_id: int = 0xABC, dp_rank: int = 3, block_size: int = 16) -> bytes:
    events = [KvEvent(event_id=4)]
    return KvEventBatch(worker_id=worker_id, dp_rank=dp_rank, block_size=block_size, events=events).SerializeToString()


def test_a_batch_on_its_own_subject_passes() -> None:
    validated = validate(SUBJECT, batch(), 16)
    assert isinstance(validated, EventBatch)
    assert (validated.rank, validated.events, validated.reached) == ((0xABC, 3), 1, 5)


@pytest.mark.parametrize(
    ("subject", "data", "reason"),
    [
        (SUBJECT, b"\xff\xff not protobuf", "unparsable"),
        (SUBJECT, batch()[:-1], "unparsable"),
        (SUBJECT, batch(worker_id=0xABD), "rank"),
        (SUBJECT, batch(dp_rank=2), "rank"),
        (SUBJECT, b"", "rank"),
        (SUBJECT, batch(block_size=32), "block_size"),
        (SUBJECT, batch(block_size=0), "block_size"),
        ("kvrouter.v1.ns.decode.events.somebody", batch(), "subject"),
        ("kvrouter.v1.ns.decode.events.0000000000000abc.-3", batch(), "subject"),
    ],
)
def test_a_batch_that_contradicts_its_envelope_is_quarantined(subject: str, data: bytes, reason: str) -> None:
    refusal = validate(subject, data, 16)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == reason
    assert refusal.detail


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_the_rank_is_read_from_its_subject(worker_id: int, dp_rank: int) -> None:
    assert rank_of_subject(COMPONENT.events_subject(worker_id, dp_rank)) == (worker_id, dp_rank)


@given(st.binary(max_size=200))
def test_no_bytes_break_it(data: bytes) -> None:
    assert isinstance(validate(SUBJECT, data, 16), Refusal | EventBatch)


def test_events_of_a_worker_that_differs_from_its_component_are_quarantined() -> None:
    refusal = validate(SUBJECT, batch(), 16, unfit_workers={0xABC})
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "unfit_worker"
    assert isinstance(validate(SUBJECT, batch(), 16, unfit_workers={0xABD}), EventBatch)
