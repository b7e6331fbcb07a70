"""Applies event messages of a component to its index.

A batch takes one of these ways: it is applied; it is quarantined, if it is invalid or its incarnation or ids are not
confirmed; it waits in the pending buffer while its rank is under repair; or it triggers a repair, which empties the
rank and requests a resync.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from kvrouter.core.interface import ApplySummary, EventBatch, PrefixIndex, Rank
from kvrouter.indexer.index.event_counts import RankTally, Tally
from kvrouter.indexer.index.evictions import EvictionLog
from kvrouter.indexer.index.incarnations import Incarnations, Verdict
from kvrouter.indexer.index.known_ranks import KnownRanks
from kvrouter.indexer.index.messages import QuarantinedMessage, ReceivedBatch, StreamMessage
from kvrouter.indexer.index.pending_buffer import PendingBuffers
from kvrouter.indexer.index.repair import PERSISTENT_DRIFT, Repair, repair_after
from kvrouter.indexer.index.shared_index import SharedIndex
from kvrouter.indexer.index.validation import Refusal, validate
from kvrouter.net.decoding import Quarantine, Undecodable

log = structlog.get_logger(component="indexer")

_QUARANTINED_MESSAGES = 64
_AT_ONCE_MESSAGES = 8
_QUARANTINED_BYTES = 4096  # per message: enough to recognise it


class EventIndex(SharedIndex):
    """The index of one component, with the counts of its events and its quarantined messages."""

    def __init__(self, component: str, block_size: int, index: PrefixIndex) -> None:
        """Creates an empty index; ``component`` is the name to log."""
        super().__init__(index)
        self.block_size = block_size
        self.tally = Tally()
        self.quarantined: deque[QuarantinedMessage] = deque(maxlen=_QUARANTINED_MESSAGES)
        self.quarantine = Quarantine()
        """Counts and logs input that cannot be decoded. The owner may replace it."""
        self.unfit_workers: frozenset[int] = frozenset()
        """Workers whose registration does not match the component's descriptor. Their events are refused."""
        self.lag_seconds = 0.0
        """Time from publishing to applying the newest batch."""
        self.on_suspect: Callable[[Rank, str], None] = _nobody
        """Called with rank and reason when a rank must be compared with its worker; from any thread."""
        self.may_retain: Callable[[Rank], bool] = _never
        """Returns whether events after a gap may wait for the missing ones; called from any thread."""
        self.is_deferred: Callable[[Rank, str], bool] = _never_deferred
        """Returns whether a repair for a reason backs off after false alarms; called from any thread."""
        self.incarnations = Incarnations()
        self._known = KnownRanks()
        self._pending: PendingBuffers[ReceivedBatch] = PendingBuffers()
        self._log = log.bind(component_name=component)
        self._evictions = EvictionLog(self._log)

    @property
    def pending_bytes(self) -> int:
        """Returns the memory of all pending buffers, in bytes."""
        return self._pending.bytes

    def rank_tally(self, rank: Rank) -> RankTally:
        """Returns the status of a rank, for reading only."""
        return self._known.view(rank)

    def apply(self, messages: Sequence[StreamMessage]) -> None:
        """Applies messages in order. Never raises because of their content.

        Must be called from one thread only, which is not the event loop's, and not during ``apply_at_once``.
        """
        for message in messages:
            batch = validate(message.subject, message.data, self.block_size, self.unfit_workers)
            with self.applying():
                if isinstance(batch, Refusal):
                    self._refuse(message, batch)
                else:
                    self._apply_batch(ReceivedBatch(message, batch))

    def apply_at_once(self, messages: Sequence[StreamMessage]) -> int:
        """Applies the first messages on the event loop, as long as each takes microseconds. Returns how many.

        ``apply`` must get the others. A long delivery is left to it altogether.
        """
        applied = 0
        if len(messages) <= _AT_ONCE_MESSAGES:
            for message in messages:
                batch = validate(message.subject, message.data, self.block_size, self.unfit_workers)
                with self.applying_at_once() as index:
                    if index is None or isinstance(batch, Refusal) or not index.applies_at_once(batch):
                        break
                    self._apply_batch(ReceivedBatch(message, batch))
                applied += 1
        return applied

    def _refuse(self, message: StreamMessage, refusal: Refusal) -> None:
        self.tally.refuse(refusal)
        self._keep_quarantined(message, refusal)
        # One faulty publisher may send thousands of invalid messages. The quarantine logs each subject once.
        self.quarantine.reject("nats", message.subject, Undecodable(refusal.reason, refusal.detail))

    def _quarantine(self, received: ReceivedBatch, reason: str, detail: str) -> None:
        """Drops a batch whose incarnation or ids are not confirmed. A resync fetches what is true of it."""
        self.tally.unconfirmed += received.batch.events or 1
        self._keep_quarantined(received.message, Refusal(reason, detail))

    def _keep_quarantined(self, message: StreamMessage, refusal: Refusal) -> None:
        data = bytes(message.data[:_QUARANTINED_BYTES])
        self.quarantined.append(QuarantinedMessage(message.subject, message.sequence, refusal, data))

    def _apply_batch(self, received: ReceivedBatch, *, again: bool = False, retain: bool = True) -> None:
        batch = received.batch
        rank = batch.rank
        buffer = self._pending.get(rank)
        if buffer is not None:
            self._pending.keep(rank, received)
            if buffer.retained:
                return
        if not self._is_admitted(received, kept=buffer is not None):
            return
        # Each round moves the cursor past one gap. A batch has at most one gap per event, and one at its end.
        for _ in range(batch.events + 2):
            summary = self._index.apply(batch)
            if summary.unparsable:
                self._refuse(received.message, Refusal("unparsable", summary.unparsable))
                return
            self._count(rank, batch, summary, again=again)
            repair = repair_after(summary, was_partial=self._known.is_partial(rank))
            if summary.unknown_parents or summary.rejected:
                self._known.set_partial(rank, True)
            if repair is None:
                break
            waits = retain and repair.reason == "gap" and not self._known.is_partial(rank)
            if waits and self._retain(received):
                break
            self._repair(rank, repair)
            if not repair.reapply:
                break
            again = True
        if not again and repair is None and not summary.fenced and batch.next_event_id < summary.next_event_id:
            # The batch is late or a duplicate, or the index applied events that the worker never published.
            self._suspect_if_whole(rank)
        self._note_lag(rank, batch)
        # Events of an earlier incarnation are no evidence about the current one.
        if summary.incarnation == batch.incarnation:
            self._known.tally(rank).evidence.heard_at = time.monotonic()

    def _count(self, rank: Rank, batch: EventBatch, summary: ApplySummary, *, again: bool) -> None:
        self.tally.add(summary, again=again)
        if summary.new_incarnation or (self._known.is_partial(rank) and summary.applied and batch.clears_all):
            self._known.set_partial(rank, False)
        if summary.rejected:
            self._log.warning("rank.events_refused", worker_id=rank[0], dp_rank=rank[1], reasons=summary.rejected)
        self._note_evictions(rank, summary)

    def _note_evictions(self, rank: Rank, summary: ApplySummary) -> None:
        for worker_id, dp_rank, dropped in summary.evicted_others:
            self._note_eviction((worker_id, dp_rank), dropped)
        if summary.evicted_blocks is not None:
            self._note_eviction(rank, summary.evicted_blocks)

    def _note_eviction(self, rank: Rank, dropped_blocks: int) -> None:
        self.tally.evictions += 1
        self._evictions.note(rank, dropped_blocks)

    def _suspect_if_whole(self, rank: Rank) -> None:
        if not self._known.is_partial(rank):
            self.on_suspect(rank, "behind")

    def _is_admitted(self, received: ReceivedBatch, *, kept: bool) -> bool:
        """Returns whether a batch may be applied, by its incarnation. A batch alone never ends an incarnation.

        A batch that is ``kept`` in a pending buffer is judged again when its worker has answered.
        """
        batch = received.batch
        rank = batch.rank
        cursor = self._index.cursor(rank)
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
            self._known.mark_unverified(rank)
            self.on_suspect(rank, "incarnation")
        self._quarantine(received, "unconfirmed_incarnation", "neither worker nor registration confirms it")
        return False

    def _retain(self, received: ReceivedBatch) -> bool:
        """Handles events after a gap without emptying the rank, if possible. Returns whether it did.

        Normally the events wait until the missing ones are fetched. If the worker did not confirm the rank's last
        gaps, they are quarantined instead: a resync follows after the back-off and fetches them if they are true.
        """
        rank = received.batch.rank
        kept = self._pending.get(rank)
        if kept is not None:
            # The batch is in the buffer already, and is applied again when the worker has answered.
            kept.retained = True
            return True
        if self.is_deferred(rank, "gap"):
            self._quarantine(received, "unconfirmed_event", "the worker did not confirm the last ids of this kind")
            self._known.mark_unverified(rank)
            self.on_suspect(rank, "gap")
            return True
        if not self.may_retain(rank):
            return False
        self._pending.open(rank, retained=True)
        self._pending.keep(rank, received)
        self._known.mark_unverified(rank)
        self.on_suspect(rank, "gap")
        return True

    def _repair(self, rank: Rank, repair: Repair) -> None:
        """Empties a rank whose blocks may be wrong, and requests a resync."""
        dropped = self._index.reset_rank(rank, repair.incarnation, repair.next_event_id, partial=True)
        self._known.set_partial(rank, True)
        self.tally.repairs += 1
        tally = self._known.tally(rank)
        tally.verified = False
        tally.resynced_unix_ns = time.time_ns()
        tally.resync_reason = repair.reason
        self._log.warning(
            "rank.dropped",
            worker_id=rank[0],
            dp_rank=rank[1],
            reason=repair.reason,
            next_event_id=repair.next_event_id,
            dropped_blocks=dropped,
        )
        if repair.reason == "drift":
            tally.drifts += 1
            place = (repair.incarnation, repair.next_event_id)
            if tally.drift_at == place:
                # The digest still differs after the worker's own state was loaded: fetching it again cannot help.
                self._log.error("rank.drift_persistent", worker_id=rank[0], dp_rank=rank[1], next_event_id=place[1])
                self.on_suspect(rank, PERSISTENT_DRIFT)
                return
            tally.drift_at = place
        self.on_suspect(rank, repair.reason)

    def _note_lag(self, rank: Rank, batch: EventBatch) -> None:
        if batch.published_unix_ns:
            self.lag_seconds = max(0.0, (time.time_ns() - batch.published_unix_ns) / 1e9)
            self._known.tally(rank).lag_seconds = self.lag_seconds


def _nobody(_rank: Rank, _reason: str) -> None:
    return None


def _never(_rank: Rank) -> bool:
    return False


def _never_deferred(_rank: Rank, _reason: str) -> bool:
    return False
