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
