"""When a snapshot is due, and what may be purged behind it: decided without I/O."""

from __future__ import annotations

from collections.abc import Iterable

from kvrouter.v1.registry_pb2 import AppliedRecord
from kvrouter.v1.snapshot_pb2 import SnapshotRef


def is_due(
    *,
    last: int,
    covered: int,
    threshold: int,
    oldest_age_seconds: float,
    retention_seconds: float,
    bytes_after: float,
    retention_bytes: int,
) -> bool:
    """Whether a snapshot is due.

    Args:
        last: Last sequence of the stream.
        covered: Sequence that the newest snapshot covers; 0 for none.
        threshold: Messages after the snapshot that make one due.
        oldest_age_seconds: Age of the oldest message after the snapshot, or more.
        retention_seconds: Age at which the stream drops messages; 0 for never. At half of it a snapshot is due, so that
            nothing expires unseen.
        bytes_after: Size of the messages after the snapshot.
        retention_bytes: Size at which the stream drops messages; 0 or less for never. As with age.
    """
    if last <= covered:
        return False
    return (
        last - covered > threshold
        or 0 < retention_seconds / 2 <= oldest_age_seconds
        or 0 < retention_bytes / 2 <= bytes_after
    )


class SnapshotAges:
    """How old snapshots are, whatever the clocks say that took them."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._seen_at = 0.0
        self._taken_here = ""

    def note_taken(self, name: str, now: float) -> None:
        """Notes a snapshot that this replica has taken; ``now`` is seconds of a monotonic clock."""
        self._name, self._seen_at, self._taken_here = name, now, name

    def of(self, name: str, taken_unix: float, now_unix: float, now: float) -> float:
        """Returns the age of the newest snapshot, seconds.

        It is the time since this replica took it or saw it first. One that another replica took may be older, as the
        wall clock says; where that says the future, one of two clocks is wrong, and it is not believed.

        Args:
            name: The snapshot; empty for none.
            taken_unix: When it was taken, seconds since 1970 by the clock of the replica that took it.
            now_unix: The time by the wall clock of this replica.
            now: The time by its monotonic clock, seconds.
        """
        if name != self._name:
            self._name, self._seen_at = name, now
        watched = now - self._seen_at
        return watched if name and name == self._taken_here else max(watched, now_unix - taken_unix)


def purge_up_to(previous: SnapshotRef, current: SnapshotRef, applied: Iterable[AppliedRecord]) -> int:
    """The last sequence that nobody needs: what both snapshots cover and every live replica has applied.

    The current one covers less than the previous where a replica that lagged was told to take it. 0 where there are
    not two, or one of them or a replica speaks of another stream.
    """
    stream = current.stream
    if previous.stream != stream:
        return 0
    limit = min(previous.stream_sequence, current.stream_sequence)
    for record in applied:
        same = (record.stream, record.stream_created_unix_ns) == (stream.name, stream.created_unix_ns)
        limit = min(limit, record.stream_sequence if same else 0)
    return limit
