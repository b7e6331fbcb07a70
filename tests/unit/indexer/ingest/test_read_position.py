from __future__ import annotations

from dataclasses import replace

import pytest
from kvrouter.indexer.ingest.read_position import (
    ConsumerView,
    Position,
    Recreate,
    StreamIdentity,
    StreamView,
    is_behind,
    is_caught_up,
    plan,
)

IDENTITY = StreamIdentity("stream", 1_000)
STREAM = StreamView(IDENTITY, last_sequence=50)
CONSUMER = ConsumerView(created_unix_ns=2_000, delivered_stream_sequence=40, pending=10)
POSITION = Position(IDENTITY, applied=40, consumer_created_unix_ns=2_000)


def test_a_replica_starts_with_the_first_message_despite_an_old_consumer() -> None:
    assert plan(None, STREAM, CONSUMER, same_message=None) == Recreate(1, "start")


def test_it_reads_on_where_nothing_changed() -> None:
    assert plan(POSITION, STREAM, CONSUMER, same_message=True) is None


def test_a_message_that_has_expired_is_no_reason_to_begin_again() -> None:
    assert plan(POSITION, STREAM, CONSUMER, same_message=None) is None


@pytest.mark.parametrize(
    ("stream", "consumer", "same", "start"),
    [
        pytest.param(replace(STREAM, identity=StreamIdentity("stream", 1_001)), CONSUMER, True, 1, id="recreated"),
        pytest.param(replace(STREAM, last_sequence=39), CONSUMER, None, 1, id="rolled back"),
        pytest.param(STREAM, CONSUMER, False, 1, id="rolled back and grown past the position since"),
        pytest.param(STREAM, None, True, 41, id="consumer lost"),
        pytest.param(STREAM, replace(CONSUMER, created_unix_ns=2_001), True, 41, id="another consumer"),
        pytest.param(STREAM, replace(CONSUMER, delivered_stream_sequence=51), True, 41, id="past the end"),
        pytest.param(STREAM, replace(CONSUMER, delivered_stream_sequence=42), True, 41, id="deliveries lost"),
    ],
)
def test_it_recreates_a_consumer_that_would_skip_the_next_message(
    stream: StreamView, consumer: ConsumerView | None, same: bool | None, start: int
) -> None:
    decision = plan(POSITION, stream, consumer, same_message=same)
    assert isinstance(decision, Recreate)
    assert decision.start_sequence == start


@pytest.mark.parametrize(
    ("stream", "behind"),
    [
        pytest.param(STREAM, False, id="all there"),
        pytest.param(replace(STREAM, first_sequence=41), False, id="the next is the oldest"),
        pytest.param(replace(STREAM, first_sequence=42), True, id="the next is gone"),
        pytest.param(replace(STREAM, first_sequence=51), True, id="all gone"),
        pytest.param(replace(STREAM, identity=StreamIdentity("stream", 1_001)), True, id="another stream"),
    ],
)
def test_a_later_snapshot_is_worth_a_look(stream: StreamView, behind: bool) -> None:
    assert is_behind(POSITION, stream) is behind


@pytest.mark.parametrize(
    ("target", "applied", "pending", "reached"),
    [
        pytest.param(0, 0, 0, True, id="empty stream"),
        pytest.param(10, 9, 1, False, id="one to go"),
        pytest.param(10, 10, 5, True, id="what came later does not count"),
        pytest.param(10, 4, 0, True, id="the rest has expired"),
    ],
)
def test_catching_up(target: int, applied: int, pending: int, reached: bool) -> None:
    assert is_caught_up(target, applied, pending) is reached
