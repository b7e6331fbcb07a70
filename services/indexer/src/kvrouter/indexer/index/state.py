"""The index of one component, and what messages, dumps and repairs do to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from kvrouter.core.interface import PrefixIndex, Rank, RankInfo
from kvrouter.indexer.index.event_counts import RankTally, Tally
from kvrouter.indexer.index.incarnations import Incarnations, Verdict
from kvrouter.indexer.index.membership import NewIncarnation
from kvrouter.indexer.index.pending_buffer import MAX_ALL_BYTES, PendingBuffer
from kvrouter.indexer.index.repair import PERSISTENT_DRIFT, Repair, repair_after
from kvrouter.indexer.index.shared_index import SharedIndex
from kvrouter.indexer.index.validation import Refusal, validate
from kvrouter.net.decoding import Quarantine, Undecodable
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import KvEventBatch

log = structlog.get_logger(component="indexer")

_QUARANTINED_MESSAGES = 64
_QUARANTINED_BYTES = 4096  # of each message: enough to see what it is


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message of the stream."""

    subject: str
    sequence: int
    """Sequence in the stream."""
    data: bytes


@dataclass(frozen=True, slots=True)
class QuarantinedMessage:
    """A message that was not applied."""

    subject: str
    sequence: int
    refusal: Refusal
    data: bytes
    """The first 4,096 bytes."""


@dataclass(frozen=True, slots=True)
class RankDump:
    """A rank's state from elsewhere."""

    rank: Rank
    cursor: tuple[int, int]
    """(incarnation, next event id)"""
    partial: bool
    chunks: list[bytes]
    """Encoded RankState, the last one marked."""


class StaleDump(Exception):
    """The index knows more than a dump: loading it would lose what does not come again."""

    def __init__(self, rank: Rank, cursor: tuple[int, int], held: tuple[int, int]) -> None:
        super().__init__(f"rank {rank}: the dump is at (incarnation, event) {cursor}, the index at {held}")


@dataclass(frozen=True, slots=True)
class RepairStart:
    """Where a rank stands when its worker is about to be asked."""

    info: RankInfo | None
    """None if the index does not know the rank."""
    claims: tuple[int, ...]
    """Incarnations that events claimed and nobody has confirmed."""


class IndexState(SharedIndex):
    """Index, counts and what was quarantined, for one component."""

    def __init__(self, component: str, block_size: int, index: PrefixIndex) -> None:
        """``component`` is its name, for the log."""
        super().__init__(index)
        self.block_size = block_size
        self.tally = Tally()
        self.quarantined: deque[QuarantinedMessage] = deque(maxlen=_QUARANTINED_MESSAGES)
        self.quarantine = Quarantine()
        """Counts and logs what cannot be decoded; its owner may replace it."""
        self.unfit_workers: frozenset[int] = frozenset()
        """Workers whose registration differs from the component: their events mean something else."""
        self.lag_seconds = 0.0
        """From publishing to applying, of the newest batch."""
        self._partial: set[Rank] = set()
        self._rank_tallies: dict[Rank, RankTally] = {}
        self._pending_batches: dict[Rank, PendingBuffer[StreamMessage]] = {}
        self.pending_bytes = 0
        """Of the batches that wait, or are kept, while their ranks are repaired."""
        self.on_suspect: Callable[[Rank, str], None] = _nobody
        """Called from any thread when a rank has to be compared with its worker, with the reason."""
        self.may_retain: Callable[[Rank], bool] = _never
        """Whether events after a gap may wait for those that are missing; asked from any thread."""
        self.is_deferred: Callable[[Rank, str], bool] = _never_deferred
        """Whether a repair for a reason has to wait, as the last such alarms were false; asked from any thread."""
        self.incarnations = Incarnations()
        self._log = log.bind(of=component)

    def apply(self, messages: Sequence[StreamMessage]) -> None:
        """Applies messages in order; called from one thread, not the loop's. Never raises for what they contain."""
        for message in messages:
            batch = validate(message.subject, message.data, self.block_size, self.unfit_workers)
            with self.applying():
                if isinstance(batch, Refusal):
                    self._refuse(message, batch)
                else:
                    self._apply_batch(message, batch)

    async def whole_rank(self, rank: Rank) -> RankDump | None:
        """A rank's state as of this moment; None if it is unknown."""

        def read(index: PrefixIndex) -> RankDump | None:
            cursor = index.cursor(rank)
            return RankDump(rank, cursor, rank in self._partial, list(index.dump_rank(rank))) if cursor else None

        return await self.work(read)

    async def load_rank(self, dump: RankDump) -> int:
        """Replaces a rank by a dump, unless the index knows more. Returns its entries.

        A dump that lacks blocks leaves the rank in need of its worker's state.

        Raises:
            StaleDump: the index is ahead of the dump, or as far and complete where the dump is not; or the dump is of
                an incarnation that the worker is not in.
            InvalidDump: the dump cannot be loaded; the index is unchanged.
        """

        def load(index: PrefixIndex) -> int:
            held = index.cursor(dump.rank)
            current = self.incarnations.current(dump.rank)
            if current is not None and dump.cursor[0] > current:
                raise StaleDump(dump.rank, dump.cursor, held or (current, 0))
            if held is not None and (held, dump.rank not in self._partial) > (dump.cursor, not dump.partial):
                raise StaleDump(dump.rank, dump.cursor, held)
            blocks = self._load(dump)
            if dump.partial:
                self._rank_tallies.setdefault(dump.rank, RankTally()).verified = False
                self.on_suspect(dump.rank, "partial")
            return blocks

        return await self.work(load)

    async def begin_repair(self, rank: Rank) -> RepairStart:
        """Keeps the rank's events from here on, until the repair ends."""

        def begin(index: PrefixIndex) -> RepairStart:
            self._pending_batches.setdefault(rank, PendingBuffer(retained=False)).mark_requested()
            info = next((info for info in index.ranks() if info[:2] == rank), None)
            return RepairStart(info, self.incarnations.claims(rank))

        return await self.work(begin)

    async def apply_fetched(self, rank: Rank, batches: Sequence[bytes]) -> bool:
        """Applies events that the worker sent again. Returns whether they fitted, without a gap or a fault."""

        def apply(index: PrefixIndex) -> bool:
            for batch in batches:
                summary = index.apply(batch)
                self.tally.add(summary, again=True)
                repair = repair_after(summary, was_partial=rank in self._partial)
                if repair is not None and repair.reason != "gap":
                    self._repair(rank, repair)
                if summary.unparsable or repair is not None:
                    return False
            return True

        return await self.work(apply)

    async def replace_rank(self, dump: RankDump, reason: str, claims: Sequence[int] = ()) -> int:
        """Replaces a rank under repair by its worker's state, then applies what was kept. Returns its entries.

        The worker's word outranks the index, its incarnation and its cursor, whether they are higher or lower.

        Args:
            dump: The worker's answer.
            reason: Why the worker was asked.
            claims: Unconfirmed incarnations that were known before it was asked.

        Raises:
            InvalidDump: the answer cannot be loaded; the index is unchanged.
        """

        def replace(index: PrefixIndex) -> int:
            held = index.cursor(dump.rank)
            pending = self._pending_batches.get(dump.rank)
            holes = pending is not None and pending.dropped > 0
            blocks = self._load(dump)
            self._confirm(dump.rank, dump.cursor[0], claims)
            self._finish(dump.rank, reason)
            reached = index.cursor(dump.rank)
            if holes and held is not None and reached is not None and held[0] == reached[0] and held > reached:
                # The bound left a hole between the state and what had been applied beside it.
                self.on_suspect(dump.rank, "gap")
            return blocks

        return await self.work(replace)

    async def confirm_rank(
        self, rank: Rank, incarnation: int, reason: str, claims: Sequence[int], *, news: bool = True
    ) -> int:
        """Ends a repair of a rank that its worker confirmed: applies the events that wait.

        Args:
            rank: The rank, to which the events that it lacked were applied.
            incarnation: Its incarnation, by its worker's word.
            reason: Why the worker was asked.
            claims: Unconfirmed incarnations that were known before it was asked.
            news: Whether the worker had events that the index lacked.

        Returns:
            How many claims the worker does not confirm: incarnations, and batches with ids that it has not reached.
        """

        def confirm(_: PrefixIndex) -> int:
            return self._confirm(rank, incarnation, claims) + self._finish(rank, reason, news=news)

        return await self.work(confirm)

    async def give_up_repair(self, rank: Rank) -> None:
        """Ends a repair that failed: applies the events that wait. A gap among them drops the rank."""
        await self.work(lambda _: self._give_up(rank))

    async def mark_unverified(self, ranks: Sequence[Rank]) -> None:
        """Notes that ranks differ from what is known of their workers."""

        def mark(_: PrefixIndex) -> None:
            for rank in ranks:
                self._rank_tallies.setdefault(rank, RankTally()).verified = False

        if ranks:
            await self.work(mark)

    def _confirm(self, rank: Rank, incarnation: int, claims: Sequence[int]) -> int:
        refuted = self.incarnations.confirm(rank, incarnation, claims)
        if refuted:
            self._log.warning(
                "rank.incarnations_refuted",
                worker_id=rank[0],
                dp_rank=rank[1],
                incarnation=incarnation,
                refuted=refuted,
            )
        return len(refuted)

    def _load(self, dump: RankDump) -> int:
        blocks = self._index.load_rank(dump.chunks)
        (self._partial.add if dump.partial else self._partial.discard)(dump.rank)
        return blocks

    def _finish(self, rank: Rank, reason: str, *, news: bool = True) -> int:
        """Applies what waits. Returns the batches whose ids the worker had not reached when it was asked."""
        tally = self._rank_tallies.setdefault(rank, RankTally())
        tally.verified = rank not in self._partial
        tally.evidence.compared_at = time.monotonic()
        if news:
            tally.evidence.news_at = tally.evidence.compared_at
        if news or reason not in ("silent", "behind"):
            tally.resynced_unix_ns, tally.resync_reason = time.time_ns(), reason
        pending = self._pending_batches.get(rank)
        requested = pending.requested if pending is not None else 0
        unknown = 0
        for place, message in enumerate(self._take_pending(rank)):
            batch = validate(message.subject, message.data, self.block_size, self.unfit_workers)
            if isinstance(batch, Refusal):
                continue
            if place < requested and self._is_ahead(rank, batch):
                unknown += 1
                self._quarantine(message, batch, "unconfirmed_event", "the worker has not reached these event ids")
            else:
                self._apply_batch(message, batch, again=True)
        return unknown

    def _is_ahead(self, rank: Rank, batch: KvEventBatch) -> bool:
        """Whether a batch names event ids that the rank has not reached."""
        cursor = self._index.cursor(rank)
        last = max((event.event_id + 1 for event in batch.events), default=0)
        return cursor is not None and batch.incarnation == cursor[0] and max(last, batch.next_event_id) > cursor[1]

    def _give_up(self, rank: Rank) -> None:
        self._rank_tallies.setdefault(rank, RankTally()).verified = False
        pending = self._pending_batches.get(rank)
        retained = pending is not None and pending.retained
        for message in self._take_pending(rank):
            batch = validate(message.subject, message.data, self.block_size, self.unfit_workers)
            if retained and not isinstance(batch, Refusal):
                self._apply_batch(message, batch, again=True, hold=False)

    def _take_pending(self, rank: Rank) -> list[StreamMessage]:
        pending = self._pending_batches.pop(rank, None)
        if pending is None:
            return []
        self.pending_bytes -= pending.bytes
        return pending.messages()

    def _keep_pending(self, pending: PendingBuffer[StreamMessage], message: StreamMessage) -> None:
        self.pending_bytes += pending.add(message, crowded=self.pending_bytes >= MAX_ALL_BYTES)

    def rank_tally(self, rank: Rank) -> RankTally:
        """What was counted of a rank."""
        return self._rank_tallies.get(rank) or RankTally()

    async def begin_incarnations(self, incarnations: Sequence[NewIncarnation]) -> None:
        """Empties ranks whose worker registered a later life than the index has."""

        def begin(index: PrefixIndex) -> None:
            for incarnation in incarnations:
                rank, held = incarnation.rank, index.cursor(incarnation.rank)
                # The worker may have been asked meanwhile, and be in another one.
                is_current = self.incarnations.current(rank) in (None, incarnation.incarnation)
                if is_current and (held is None or held[0] < incarnation.incarnation):
                    dropped = index.reset_rank(rank, incarnation.incarnation, 0, partial=False)
                    self._partial.discard(rank)
                    self._rank_tallies.setdefault(rank, RankTally()).verified = False
                    self._log.info(
                        "rank.incarnation_started", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped
                    )

        if incarnations:
            await self.work(begin)

    async def forget(self, ranks: Sequence[Rank]) -> None:
        """Drops ranks whose worker is gone for good."""

        def drop(index: PrefixIndex) -> None:
            for rank in ranks:
                dropped = index.remove_rank(rank)
                self._partial.discard(rank)
                self._rank_tallies.pop(rank, None)
                self._take_pending(rank)
                self.incarnations.forget(rank)
                self._log.info("rank.removed", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped)

        if ranks:
            await self.work(drop)

    def _refuse(self, message: StreamMessage, refusal: Refusal) -> None:
        self.tally.refuse(refusal)
        self.quarantined.append(
            QuarantinedMessage(message.subject, message.sequence, refusal, bytes(message.data[:_QUARANTINED_BYTES]))
        )
        # Who sends one bad message may send thousands: the quarantine logs a subject once.
        self.quarantine.reject("nats", message.subject, Undecodable(refusal.reason, refusal.detail))

    def _apply_batch(
        self, message: StreamMessage, batch: KvEventBatch, *, again: bool = False, hold: bool = True
    ) -> None:
        rank = (batch.worker_id, batch.dp_rank)
        pending = self._pending_batches.get(rank)
        if pending is not None:
            self._keep_pending(pending, message)
            if pending.retained:
                return
        if not self._is_admitted(message, batch, kept=pending is not None):
            return
        # Each round moves the cursor past one gap, and a batch has no more gaps than events, plus one at its end.
        for _ in range(len(batch.events) + 2):
            summary = self._index.apply(message.data)
            if summary.unparsable:
                self._refuse(message, Refusal("unparsable", summary.unparsable))
                return
            self.tally.add(summary, again=again)
            if summary.new_incarnation or (rank in self._partial and summary.applied and _empties(batch)):
                self._partial.discard(rank)
            if summary.rejected:
                self._log.warning("rank.events_refused", worker_id=rank[0], dp_rank=rank[1], reasons=summary.rejected)
            repair = repair_after(summary, was_partial=rank in self._partial)
            if summary.unknown_parents or summary.rejected:
                self._partial.add(rank)
            if repair is None:
                break
            if hold and repair.reason == "gap" and rank not in self._partial and self._retain(rank, message, batch):
                break
            self._repair(rank, repair)
            if not repair.reapply:
                break
            again = True
        if not again and repair is None and not summary.fenced and batch.next_event_id < summary.next_event_id:
            # It came late or twice, or the index applied events that the worker never had.
            self._suspect_if_whole(rank)
        self._note_lag(rank, batch)
        # What a former incarnation left in the stream says nothing about the rank of today.
        if summary.incarnation == batch.incarnation:
            self._rank_tallies.setdefault(rank, RankTally()).evidence.heard_at = time.monotonic()

    def _suspect_if_whole(self, rank: Rank) -> None:
        if rank not in self._partial:
            self.on_suspect(rank, "behind")

    def _is_admitted(self, message: StreamMessage, batch: KvEventBatch, *, kept: bool) -> bool:
        """Whether a batch may be applied, by its incarnation. A batch alone never ends an incarnation.

        One that is ``kept`` while its worker is asked is judged again when the worker has answered.
        """
        rank = (batch.worker_id, batch.dp_rank)
        cursor = self._index.cursor(rank)
        verdict = self.incarnations.judge(rank, batch.incarnation, cursor[0] if cursor else None)
        if verdict == Verdict.APPLY:
            return True
        if kept:
            return False
        self.tally.batches += 1
        if verdict == Verdict.FENCED:
            self.tally.fenced += len(batch.events) or 1
            return False
        if verdict == Verdict.UNCONFIRMED:
            if not self.incarnations.claims(rank):
                self._log.warning(
                    "rank.incarnation_unconfirmed", worker_id=rank[0], dp_rank=rank[1], incarnation=batch.incarnation
                )
            self.incarnations.claim(rank, batch.incarnation)
            self._rank_tallies.setdefault(rank, RankTally()).verified = False
            self.on_suspect(rank, "incarnation")
        self._quarantine(message, batch, "unconfirmed_incarnation", "neither worker nor registration confirms it")
        return False

    def _quarantine(self, message: StreamMessage, batch: KvEventBatch, reason: str, detail: str) -> None:
        """Drops a batch whose claims are not confirmed. The worker's state has whatever is true of it."""
        self.tally.unconfirmed += len(batch.events) or 1
        data = bytes(message.data[:_QUARANTINED_BYTES])
        self.quarantined.append(QuarantinedMessage(message.subject, message.sequence, Refusal(reason, detail), data))

    def _retain(self, rank: Rank, message: StreamMessage, batch: KvEventBatch) -> bool:
        """Lets events wait for those that are missing before them, if somebody is there to fetch these.

        Where the worker did not confirm the last gaps, they are deferred: the worker is asked a little later, and has
        them if they are true.
        """
        requested = self._pending_batches.get(rank)
        if requested is not None:
            # It is kept already, and applied again when the worker has answered.
            requested.retained = True
            return True
        if self.is_deferred(rank, "gap"):
            self._quarantine(message, batch, "unconfirmed_event", "the worker did not confirm such ids shortly before")
            self._rank_tallies.setdefault(rank, RankTally()).verified = False
            self.on_suspect(rank, "gap")
            return True
        if not self.may_retain(rank):
            return False
        pending = self._pending_batches[rank] = PendingBuffer(retained=True)
        self._keep_pending(pending, message)
        self._rank_tallies.setdefault(rank, RankTally()).verified = False
        self.on_suspect(rank, "gap")
        return True

    def _repair(self, rank: Rank, repair: Repair) -> None:
        dropped = self._index.reset_rank(rank, repair.incarnation, repair.next_event_id, partial=True)
        self._partial.add(rank)
        self.tally.repairs += 1
        tally = self._rank_tallies.setdefault(rank, RankTally())
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
                # The worker's own state was loaded and its digest differs still: fetching it again cannot help.
                self._log.error("rank.drift_persistent", worker_id=rank[0], dp_rank=rank[1], next_event_id=place[1])
                self.on_suspect(rank, PERSISTENT_DRIFT)
                return
            tally.drift_at = place
        self.on_suspect(rank, repair.reason)

    def _note_lag(self, rank: Rank, batch: KvEventBatch) -> None:
        if batch.published_unix_ns:
            self.lag_seconds = max(0.0, (time.time_ns() - batch.published_unix_ns) / 1e9)
            self._rank_tallies.setdefault(rank, RankTally()).lag_seconds = self.lag_seconds


def _empties(batch: KvEventBatch) -> bool:
    """Whether a batch clears every tier, after which nothing is missing."""
    return any(
        event.WhichOneof("change") == "cleared" and event.tier == Tier.TIER_UNSPECIFIED for event in batch.events
    )


def _nobody(_rank: Rank, _reason: str) -> None:
    return None


def _never(_rank: Rank) -> bool:
    return False


def _never_deferred(_rank: Rank, _reason: str) -> bool:
    return False
