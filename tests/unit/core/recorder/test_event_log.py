"""The bounds of the buffer, and what it says when they are passed."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.core.interface import EventsGone
from kvrouter.core.reference.event_log import EventLog
from kvrouter.core.reference.rank_state import NumberedEvent


def event(number: int, size: int = 10) -> NumberedEvent:
    return NumberedEvent(number, bytes(size), number)


def ids(events: list[NumberedEvent]) -> list[int]:
    return [item.event_id for item in events]


@given(st.lists(st.integers(1, 40) | st.none(), max_size=60), st.integers(1, 8), st.integers(40, 120))
def test_every_event_is_taken_once_in_order_or_counted_as_dropped(
    steps: list[int | None], max_events: int, max_bytes: int
) -> None:
    log, taken, recorded, waiting = EventLog(max_events, max_bytes), [], 0, 0
    for size in steps:
        if size is None:
            batch = log.take(50)
            assert len(batch) == 1 or sum(len(item.encoded) for item in batch) <= 50
            taken += ids(batch)
        else:
            log.extend([event(recorded, size)])
            recorded += 1
        waiting = log.unsent
        assert waiting <= max_events
        assert log.unsent_bytes <= max_bytes
    assert taken == sorted(set(taken))
    assert len(taken) + log.dropped + waiting == recorded


def test_sent_events_go_before_unsent_ones() -> None:
    log = EventLog(4, 1000)
    log.extend(event(number) for number in range(3))
    assert ids(log.take(1000)) == [0, 1, 2]
    log.extend(event(number) for number in range(3, 7))
    assert log.dropped == 0
    log.extend([event(7)])
    assert log.dropped == 1
    assert ids(log.take(1000)) == [4, 5, 6, 7]


def test_events_are_served_again_while_they_are_kept() -> None:
    log = EventLog(5, 1000)
    log.extend(event(number) for number in range(8))
    log.take(1000)
    assert [ids(run) for run in log.since(4, 0, 25)] == [[4, 5], [6, 7]]
    assert [ids(run) for run in log.since(3, 5, 1000)] == [[3, 4]]
    for gone in (2, 8):
        with pytest.raises(EventsGone):
            log.since(gone, 0, 1000)
    with pytest.raises(EventsGone):
        EventLog(5, 1000).since(0, 0, 1000)
