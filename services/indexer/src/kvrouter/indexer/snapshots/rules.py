"""Decides when a snapshot is due and which messages may be purged after it, without I/O."""

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
    """Returns whether a snapshot is due: by the number, age or size of the messages after the newest snapshot.

    Half of the stream's retention makes one due, so that no message expires before a snapshot covers it.

    Args:
        last: Last sequence of the stream.
        covered: Last sequence in the newest snapshot; 0 for none.
        threshold: Number of messages after the snapshot above which the next one is due.
        oldest_age_seconds: Upper bound on the age of the oldest message after the snapshot.
        retention_seconds: Age at which the stream deletes messages; 0 for never.
        bytes_after: Size of the messages after the snapshot.
        retention_bytes: Size at which the stream deletes messages; 0 or less for never.
    """
    if last <= covered:
        return False
    return (
        last - covered > threshold
        or 0 < retention_seconds / 2 <= oldest_age_seconds
        or 0 < retention_bytes / 2 <= bytes_after
    )


class SnapshotAges:
    """Age of the newest snapshot, robust against wrong clocks of the replicas."""

    def __init__(self) -> None:
        self._name: str | None = None
        self._seen_at = 0.0
        self._taken_here = ""

    def note_taken(self, name: str, now: float) -> None:
        """Records a snapshot of this replica; ``now`` is the time by a monotonic clock, in seconds."""
        self._name, self._seen_at, self._taken_here = name, now, name

    def of(self, name: str, taken_unix: float, now_unix: float, now: float) -> float:
        """Returns the age of the newest snapshot, in seconds.

        It is the time since this replica took the snapshot or first read of it. The wall clock may show that another
        replica's snapshot is older. A time in the future means a wrong clock, and is ignored.

        Args:
            name: Name of the snapshot; empty for none.
            taken_unix: Time of the snapshot by the clock of its replica, seconds since 1970.
            now_unix: Time by this replica's wall clock, seconds since 1970.
            now: Time by this replica's monotonic clock, seconds.
        """
        if name != self._name:
            self._name, self._seen_at = name, now
        watched = now - self._seen_at
        return watched if name and name == self._taken_here else max(watched, now_unix - taken_unix)


def purge_up_to(previous: SnapshotRef, current: SnapshotRef, applied: Iterable[AppliedRecord]) -> int:
    """Returns the last purgeable sequence: covered by both snapshots and applied by every live replica.

    The current snapshot covers less than the previous one if an operator had a lagging replica take it. Returns 0 if
    there are not two snapshots, or if one of them or a replica's record refers to another stream.
    """
    stream = current.stream
    if previous.stream != stream:
        return 0
    limit = min(previous.stream_sequence, current.stream_sequence)
    for record in applied:
        same = (record.stream, record.stream_created_unix_ns) == (stream.name, stream.created_unix_ns)
        limit = min(limit, record.stream_sequence if same else 0)
    return limit
