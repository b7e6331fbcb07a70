"""Applies event messages of a component to its index.

A batch takes one of these ways: it is applied; it is quarantined, if it is invalid or its incarnation or ids are not
confirmed; it waits in the pending buffer, after a gap and during a resync of its rank; or it resets the rank, which
empties it and requests a resync.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog
from kvrouter.core.interface import ApplySummary, EventBatch, PrefixIndex, Rank
from kvrouter.indexer.index.event_counts import EvictionLog, Tally
from kvrouter.indexer.index.incarnations import Incarnations, Verdict
from kvrouter.indexer.index.known_ranks import KnownRanks
from kvrouter.indexer.index.messages import QuarantinedMessage, ReceivedBatch, Refusal, StreamMessage, validate
from kvrouter.indexer.index.pending_buffers import PendingBuffers
from kvrouter.indexer.index.rank_reset import PERSISTENT_DRIFT, RankReset, ResyncPolicy, reset_after
from kvrouter.indexer.index.shared_index import SharedIndex
from kvrouter.net.decoding import Quarantine, Undecodable

log = structlog.get_logger(component="indexer")

_QUARANTINED_MESSAGES = 64
_AT_ONCE_MESSAGES = 32
_AT_ONCE_NS = 600_000
"""Time to apply the messages of a delivery on the event loop, as estimated; to read them takes as long."""
_SHORT_NS = 150_000
"""The same of one message: its way to a thread and back takes longer."""
_QUARANTINED_BYTES = 4096  # per message: enough to recognise it


@dataclass(eq=False)
class EventApplier:
    """Applies events to a shared index, counts them, and keeps early ones."""

    component: str
    """Name of the component, for logs."""
    block_size: int
    """Tokens per block of the component."""
    shared: SharedIndex
    """The index."""
    known: KnownRanks
    """Status of the ranks."""
    policy: ResyncPolicy
    """Requests and defers resyncs."""
    quarantine: Quarantine
    """Counts and logs undecodable input."""

    def __post_init__(self) -> None:
        self.tally = Tally()
        self.quarantined: deque[QuarantinedMessage] = deque(maxlen=_QUARANTINED_MESSAGES)
        self.lag_seconds = 0.0
        """Time from publishing to applying the newest batch."""
        self.incarnations = Incarnations()
        self.pending: PendingBuffers[ReceivedBatch] = PendingBuffers()
        self._unfit_workers: frozenset[int] = frozenset()
        self._log = log.bind(component_name=self.component)
        self._evictions = EvictionLog(self._log)

    def register(self, incarnations: Mapping[Rank, int], unfit_workers: frozenset[int]) -> None:
        """Replaces the registered incarnations, and the workers whose registration contradicts the descriptor.

        Events of unfit workers are refused.
        """
        self.incarnations.register(incarnations)
        self._unfit_workers = unfit_workers

    def apply(self, messages: Sequence[StreamMessage]) -> None:
        """Applies messages in order. Never raises because of their content.

        Must be called from one thread only, which is not the event loop's, and not during ``apply_at_once``.
        """
        for message in messages:
            batch = validate(message.subject, message.data, self.block_size, self._unfit_workers)
            with self.shared.applying() as index:
                if isinstance(batch, Refusal):
                    self._refuse(message, batch)
                else:
                    self.apply_batch(index, ReceivedBatch(message, batch))

    def apply_at_once(self, messages: Sequence[StreamMessage], most_ns: int = _SHORT_NS) -> int:
        """Applies the first messages on the event loop, as long as they take little time. Returns how many.

        ``apply`` must get the others, from the first one on that takes more than ``most_ns``, as estimated. A long
        delivery is left to it altogether.
        """
        applied, left = 0, _AT_ONCE_NS
        if len(messages) > _AT_ONCE_MESSAGES or (index := self.shared.begin_at_once()) is None:
            return applied
        try:
            for message in messages:
                batch = validate(message.subject, message.data, self.block_size, self._unfit_workers)
                if isinstance(batch, Refusal) or (ns := index.apply_ns(batch)) is None or ns > left or ns > most_ns:
                    break
                left -= ns
                self.apply_batch(index, ReceivedBatch(message, batch))
                applied += 1
        finally:
            self.shared.end()
        return applied

    def _refuse(self, message: StreamMessage, refusal: Refusal) -> None:
        self.tally.refuse(refusal)
        self._keep_quarantined(message, refusal)
        # One faulty publisher may send thousands of invalid messages. The quarantine logs each subject once.
        self.quarantine.reject("nats", message.subject, Undecodable(refusal.reason, refusal.detail))

    def quarantine_batch(self, received: ReceivedBatch, reason: str, detail: str) -> None:
        """Drops a batch whose incarnation or ids are not confirmed. A resync fetches the true part of it."""
        self.tally.unconfirmed += received.batch.events or 1
        self._keep_quarantined(received.message, Refusal(reason, detail))

    def _keep_quarantined(self, message: StreamMessage, refusal: Refusal) -> None:
        data = bytes(message.data[:_QUARANTINED_BYTES])
        self.quarantined.append(QuarantinedMessage(message.subject, message.sequence, refusal, data))

    def apply_batch(
        self, index: PrefixIndex, received: ReceivedBatch, *, again: bool = False, retain: bool = True
    ) -> None:
        """Applies a batch. Its rank may be reset, or a resync requested. The caller owns the index's lock.

        Args:
            index: The index.
            received: The batch.
            again: Whether the batch waited in a pending buffer.
            retain: Whether the batch may wait for missing events.
        """
        batch = received.batch
        rank = batch.rank
        buffer = self.pending.get(rank)
        if buffer is not None:
            self.pending.keep(rank, received)
            if buffer.retained:
                return
        is_current = self.incarnations.current(rank) == batch.incarnation
        if not is_current and not self._is_admitted(index, received, kept=buffer is not None):
            return
        # Each round moves the cursor past one gap. A batch has at most one gap per event, and one at its end.
        for _ in range(batch.events + 2):
            summary = index.apply(batch)
            if summary.unparsable:
                self._refuse(received.message, Refusal("unparsable", summary.unparsable))
                return
            self._count(rank, batch, summary, again=again)
            reset = None
            if summary.is_plain:
                break
            reset = reset_after(summary, was_partial=self.known.is_partial(rank))
            if summary.unknown_parents or summary.rejected:
                self.known.set_partial(rank, True)
            if reset is None:
                break
            waits = retain and reset.reason == "gap" and not self.known.is_partial(rank)
            if waits and self._retain(received):
                break
            self.drop(index, rank, reset)
            if not reset.reapply:
                break
            again = True
        if not again and reset is None and not summary.fenced and batch.next_event_id < summary.next_event_id:
            # The batch is late or a duplicate, or the index applied events that the worker never published.
            self._request_if_whole(rank)
        tally = self.known.tally(rank)
        if batch.published_unix_ns:
            tally.lag_seconds = self.lag_seconds = max(0.0, (time.time_ns() - batch.published_unix_ns) / 1e9)
        # Events of an earlier incarnation are no evidence about the current one.
        if summary.incarnation == batch.incarnation:
            tally.evidence.heard_at = time.monotonic()

    def _count(self, rank: Rank, batch: EventBatch, summary: ApplySummary, *, again: bool) -> None:
        self.tally.add(summary, again=again)
        if summary.new_incarnation or (batch.clears_all and summary.applied and self.known.is_partial(rank)):
            self.known.set_partial(rank, False)
        if summary.rejected:
            self._log.warning("rank.events_refused", worker_id=rank[0], dp_rank=rank[1], reasons=summary.rejected)
        if summary.evicted_others or summary.evicted_blocks is not None:
            self.note_evictions(rank, summary)

    def note_evictions(self, rank: Rank, summary: ApplySummary) -> None:
        """Counts and logs the ranks evicted by a batch."""
        for worker_id, dp_rank, dropped in summary.evicted_others:
            self.note_eviction((worker_id, dp_rank), dropped)
        if summary.evicted_blocks is not None:
            self.note_eviction(rank, summary.evicted_blocks)

    def note_eviction(self, rank: Rank, dropped_blocks: int) -> None:
        """Counts and logs the eviction of a rank."""
        self.tally.evictions += 1
        self._evictions.note(rank, dropped_blocks)

    def _request_if_whole(self, rank: Rank) -> None:
        if not self.known.is_partial(rank):
            self.policy.request(rank, "behind")

    def _is_admitted(self, index: PrefixIndex, received: ReceivedBatch, *, kept: bool) -> bool:
        """Returns whether a batch may be applied, by its incarnation. A batch alone never ends an incarnation.

        A batch ``kept`` in a pending buffer is judged again when its worker has answered.
        """
        batch = received.batch
        rank = batch.rank
        cursor = index.cursor(rank)
        verdict = self.incarnations.judge(rank, batch.incarnation, cursor[0] if cursor else None)
        if verdict == Verdict.APPLY:
            return True
        if kept:
            return False
        self.tally.batches += 1
        if verdict == Verdict.FENCED:
            self.tally.fenced += batch.events or 1
            return False
        if verdict == Verdict.UNCONFIRMED:
            if not self.incarnations.claims(rank):
                self._log.warning(
                    "rank.incarnation_unconfirmed", worker_id=rank[0], dp_rank=rank[1], incarnation=batch.incarnation
                )
            self.incarnations.claim(rank, batch.incarnation)
            self.known.mark_unverified(rank)
            self.policy.request(rank, "incarnation")
        self.quarantine_batch(received, "unconfirmed_incarnation", "neither worker nor registration confirms it")
        return False

    def _retain(self, received: ReceivedBatch) -> bool:
        """Handles events after a gap without emptying the rank, if possible. Returns whether it did.

        Normally the events wait until the missing ones are fetched. If the worker did not confirm the rank's last
        gaps, they are quarantined instead: a resync follows after the back-off and fetches them if they are true.
        """
        rank = received.batch.rank
        kept = self.pending.get(rank)
        if kept is not None:
            # The batch is in the buffer already, and is applied again when the worker has answered.
            kept.retained = True
            return True
        if self.policy.is_deferred(rank, "gap"):
            self.quarantine_batch(received, "unconfirmed_event", "the worker did not confirm the last ids of this kind")
            self.known.mark_unverified(rank)
            self.policy.request(rank, "gap")
            return True
        if not self.policy.may_retain(rank):
            return False
        self.pending.open(rank, retained=True)
        self.pending.keep(rank, received)
        self.known.mark_unverified(rank)
        self.policy.request(rank, "gap")
        return True

    def drop(self, index: PrefixIndex, rank: Rank, reset: RankReset) -> None:
        """Empties a rank whose blocks may be wrong, and requests a resync."""
        dropped = index.reset_rank(rank, reset.incarnation, reset.next_event_id, partial=True)
        self.known.set_partial(rank, True)
        self.tally.repairs += 1
        tally = self.known.tally(rank)
        tally.verified = False
        tally.resynced_unix_ns = time.time_ns()
        tally.resync_reason = reset.reason
        self._log.warning(
            "rank.dropped",
            worker_id=rank[0],
            dp_rank=rank[1],
            reason=reset.reason,
            next_event_id=reset.next_event_id,
            dropped_blocks=dropped,
        )
        if reset.reason == "drift":
            tally.drifts += 1
            place = (reset.incarnation, reset.next_event_id)
            if tally.drift_at == place:
                # The digest still differs after the worker's own state was loaded: fetching it again cannot help.
                self._log.error("rank.drift_persistent", worker_id=rank[0], dp_rank=rank[1], next_event_id=place[1])
                self.policy.request(rank, PERSISTENT_DRIFT)
                return
            tally.drift_at = place
        self.policy.request(rank, reset.reason)

    def take_pending(self, rank: Rank) -> list[ReceivedBatch]:
        """Removes the pending buffer of a rank. Returns its batches; none if its worker has become unfit."""
        taken = self.pending.take(rank)
        return [] if rank[0] in self._unfit_workers else taken
