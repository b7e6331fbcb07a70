from __future__ import annotations

from kvrouter.indexer.snapshots.rules import SnapshotAges, is_due, purge_up_to
from kvrouter.v1.registry_pb2 import AppliedRecord
from kvrouter.v1.snapshot_pb2 import SnapshotRef, StreamIdentity

STREAM = StreamIdentity(name="s", created_unix_ns=9)


def due(last: int, covered: int, age: float, retention: float = 60, size: float = 0, most: int = 1000) -> bool:
    return is_due(
        last=last,
        covered=covered,
        threshold=100,
        oldest_age_seconds=age,
        retention_seconds=retention,
        bytes_after=size,
        retention_bytes=most,
    )


def test_a_snapshot_is_due_by_messages_by_age_or_by_size_but_never_without_messages() -> None:
    assert not due(last=150, covered=50, age=29)
    assert due(last=151, covered=50, age=0)
    assert due(last=51, covered=50, age=30)
    assert not due(last=50, covered=50, age=1000)
    assert not due(last=9, covered=0, age=1e9, retention=0)
    assert not due(last=51, covered=50, age=0, size=499)
    assert due(last=51, covered=50, age=0, size=500)
    assert not due(last=50, covered=50, age=0, size=500)
    assert not due(last=51, covered=50, age=0, size=1e9, most=-1)


def applied(sequence: int, created: int = 9) -> AppliedRecord:
    return AppliedRecord(stream="s", stream_created_unix_ns=created, stream_sequence=sequence)


def test_only_what_nobody_needs_is_purged() -> None:
    previous = SnapshotRef(object_name="p", stream=STREAM, stream_sequence=40)
    current = SnapshotRef(object_name="c", stream=STREAM, stream_sequence=60)
    other = SnapshotRef(object_name="o", stream=StreamIdentity(name="s", created_unix_ns=10), stream_sequence=60)
    assert purge_up_to(previous, current, [applied(70), applied(90)]) == 40
    assert purge_up_to(previous, current, [applied(70), applied(30)]) == 30
    assert purge_up_to(previous, current, [applied(70), applied(90, created=8)]) == 0
    assert purge_up_to(SnapshotRef(), current, [applied(70)]) == 0
    assert purge_up_to(previous, other, []) == 0
    assert purge_up_to(current, previous, [applied(70)]) == 40, "a replica that lagged took the current one"


def test_a_snapshot_of_a_clock_that_is_ahead_falls_due_all_the_same() -> None:
    ages = SnapshotAges()
    ten_years = 10 * 365 * 86_400.0
    assert ages.of("a", 1e9 + ten_years, 1e9, now=5.0) == 0.0
    assert ages.of("a", 1e9 + ten_years, 1e9 + 60, now=65.0) == 60.0
    assert ages.of("b", 1e9 + ten_years, 1e9 + 61, now=66.0) == 0.0


def test_a_changed_clock_does_not_age_a_replicas_own_snapshot() -> None:
    ages = SnapshotAges()
    assert ages.of("a", 1e9, 1e9 + 50, now=5.0) == 50.0
    ages.note_taken("b", 10.0)
    assert ages.of("b", 1e9, 2e9, now=12.0) == 2.0
