"""Statistics of one rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankStats:
    """Statistics of one rank since its publisher was created."""

    dp_rank: int
    incarnation: int
    next_event_id: int
    """Number of events recorded; also the id of the next."""
    digest: int
    """Digest of the rank's state, as in KvEventBatch."""
    blocks: int
    """Resident blocks."""
    partial: bool
    """Whether blocks may be missing, because the engine's events were lost."""
    events_lost: int
    """Number of losses of the engine's events."""
    restarts: int
    """Number of restarts of the rank's engine."""
    unknown_removals: int
    """Removed blocks not resident in their tier; their removal is not published."""
    unplaced_blocks: int
    """Blocks of ``stored_in_tier`` without a place; they are not published."""
    copy_counting_doubts: int
    """Contradictions of the configured copy counting."""
    batches_sent: int
    heartbeats_sent: int
    bytes_sent: int
    """Bytes of batches and heartbeats."""
    retries: int
    """Failed attempts to send a batch."""
    events_dropped: int
    """Events never sent because the buffer was full or the server refused them; consumers fetch the state."""
    unsent_events: int
    """Events to send."""
    unsent_bytes: int
    waiting_seconds: float
    """Time for which the current batch could not be sent, seconds; 0 if none waits."""
    waiting_reason: str
    """Error of its last attempt; empty if none waits."""
    state_age_seconds: float | None
    """Time since the rank's snapshot was last up to date, seconds; None before the first, or without snapshots."""
    state_failures: int
    """Failed attempts to write the snapshot since the last success."""
