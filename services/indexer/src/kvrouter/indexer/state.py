"""The index of one component, and what messages, dumps and repairs do to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from kvrouter.core.interface import PrefixIndex, Rank, RankInfo
from kvrouter.indexer.membership import NewLife
from kvrouter.indexer.repair import Repair, repair_after
from kvrouter.indexer.screening import Refusal, screen
from kvrouter.indexer.shared_index import SharedIndex
from kvrouter.indexer.tally import RankTally, Tally
from kvrouter.indexer.waiting import MAX_ALL_BYTES, Waiting
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import KvEventBatch

log = structlog.get_logger(component="indexer")

_SET_ASIDE_MESSAGES = 64
_SET_ASIDE_BYTES = 4096  # of each message: enough to see what it is


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A message of the stream."""

    subject: str
    sequence: int
    """Sequence in the stream."""
    data: bytes


@dataclass(frozen=True, slots=True)
class SetAside:
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


class IndexState(SharedIndex):
    """Index, counts and what was set aside, for one component."""

    def __init__(self, component: str, block_size: int, index: PrefixIndex) -> None:
        """``component`` is its name, for the log."""
        super().__init__(index)
        self.block_size = block_size
        self.tally = Tally()
        self.set_aside: deque[SetAside] = deque(maxlen=_SET_ASIDE_MESSAGES)
        self.unfit_workers: frozenset[int] = frozenset()
        """Workers whose registration differs from the component: their events mean something else."""
        self.lag_seconds = 0.0
        """From publishing to applying, of the newest batch."""
        self._partial: set[Rank] = set()
        self._rank_tallies: dict[Rank, RankTally] = {}
        self._waiting_batches: dict[Rank, Waiting[StreamMessage]] = {}
        self.waiting_bytes = 0
        """Of the batches that wait, or are kept, while their ranks are repaired."""
        self.on_suspect: Callable[[Rank, str], None] = _nobody
        """Called from any thread when a rank needs its worker's state, with the reason."""
        self.may_hold: Callable[[Rank], bool] = _never
        """Whether events after a gap may wait for those that are missing; asked from any thread."""
        self._log = log.bind(of=component)

    def apply(self, messages: Sequence[StreamMessage]) -> None:
        """Applies messages in order; called from one thread, not the loop's. Never raises for what they contain."""
        for message in messages:
            batch = screen(message.subject, message.data, self.block_size, self.unfit_workers)
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
            StaleDump: the index is ahead of the dump, or as far and complete where the dump is not.
            InvalidDump: the dump cannot be loaded; the index is unchanged.
        """

        def load(index: PrefixIndex) -> int:
            held = index.cursor(dump.rank)
            if held is not None and (held, dump.rank not in self._partial) > (dump.cursor, not dump.partial):
                raise StaleDump(dump.rank, dump.cursor, held)
            blocks = self._load(dump)
            if dump.partial:
                self._rank_tallies.setdefault(dump.rank, RankTally()).verified = False
                self.on_suspect(dump.rank, "partial")
            return blocks

        return await self.work(load)

    async def begin_repair(self, rank: Rank) -> RankInfo | None:
        """Keeps the rank's events from here on, until the repair ends. Returns where the rank stands, if known."""

        def begin(index: PrefixIndex) -> RankInfo | None:
            self._waiting_batches.setdefault(rank, Waiting(held_back=False))
            return next((info for info in index.ranks() if info[:2] == rank), None)

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

    async def replace_rank(self, dump: RankDump, reason: str) -> int:
        """Replaces a rank under repair by its worker's state, then applies what was kept. Returns its entries.

        Raises:
            StaleDump: the dump is of an earlier life.
            InvalidDump: it cannot be loaded. In both cases the index is unchanged.
        """

        def replace(index: PrefixIndex) -> int:
            held = index.cursor(dump.rank)
            if held is not None and held[0] > dump.cursor[0]:
                raise StaleDump(dump.rank, dump.cursor, held)
            blocks = self._load(dump)
            self._finish(dump.rank, reason)
            reached = index.cursor(dump.rank)
            if held is not None and reached is not None and held > reached:
                # The bound left a hole between the state and what had been applied beside it.
                self.on_suspect(dump.rank, "gap")
            return blocks

        return await self.work(replace)

    async def end_repair(self, rank: Rank, reason: str, *, repaired: bool, news: bool = True) -> None:
        """Ends a repair without replacing the rank: applies the events that wait.

        Where the rank is not ``repaired``, a gap among them drops it. ``news`` says whether the worker had events that
        the index lacked.
        """
        await self.work(lambda _: self._finish(rank, reason, news=news) if repaired else self._give_up(rank))

    def _load(self, dump: RankDump) -> int:
        blocks = self._index.load_rank(dump.chunks)
        (self._partial.add if dump.partial else self._partial.discard)(dump.rank)
        return blocks

    def _finish(self, rank: Rank, reason: str, *, news: bool = True) -> None:
        tally = self._rank_tallies.setdefault(rank, RankTally())
        tally.verified = rank not in self._partial
        tally.evidence.compared_at = time.monotonic()
        if news:
            tally.evidence.news_at = tally.evidence.compared_at
        if news or reason != "silent":
            tally.resynced_unix_ns, tally.resync_reason = time.time_ns(), reason
        for message in self._take_waiting(rank):
            batch = screen(message.subject, message.data, self.block_size, self.unfit_workers)
            if not isinstance(batch, Refusal):
                self._apply_batch(message, batch, again=True)

    def _give_up(self, rank: Rank) -> None:
        self._rank_tallies.setdefault(rank, RankTally()).verified = False
        waiting = self._waiting_batches.get(rank)
        held_back = waiting is not None and waiting.held_back
        for message in self._take_waiting(rank):
            batch = screen(message.subject, message.data, self.block_size, self.unfit_workers)
            if held_back and not isinstance(batch, Refusal):
                self._apply_batch(message, batch, again=True, hold=False)

    def _take_waiting(self, rank: Rank) -> list[StreamMessage]:
        waiting = self._waiting_batches.pop(rank, None)
        if waiting is None:
            return []
        self.waiting_bytes -= waiting.bytes
        return waiting.messages()

    def _keep_waiting(self, waiting: Waiting[StreamMessage], message: StreamMessage) -> None:
        self.waiting_bytes += waiting.add(message, crowded=self.waiting_bytes >= MAX_ALL_BYTES)

    def rank_tally(self, rank: Rank) -> RankTally:
        """What was counted of a rank."""
        return self._rank_tallies.get(rank) or RankTally()

    async def begin_lives(self, lives: Sequence[NewLife]) -> None:
        """Empties ranks whose worker registered a later life than the index has."""

        def begin(index: PrefixIndex) -> None:
            for life in lives:
                rank, held = life.rank, index.cursor(life.rank)
                if held is None or held[0] < life.incarnation:
                    dropped = index.reset_rank(rank, life.incarnation, 0, partial=False)
                    self._partial.discard(rank)
                    self._rank_tallies.setdefault(rank, RankTally()).verified = False
                    self._log.info("rank begins a life", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped)

        if lives:
            await self.work(begin)

    async def forget(self, ranks: Sequence[Rank]) -> None:
        """Drops ranks whose worker is gone for good."""

        def drop(index: PrefixIndex) -> None:
            for rank in ranks:
                dropped = index.remove_rank(rank)
                self._partial.discard(rank)
                self._rank_tallies.pop(rank, None)
                self._take_waiting(rank)
                self._log.info("rank is gone", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped)

        if ranks:
            await self.work(drop)

    def _refuse(self, message: StreamMessage, refusal: Refusal) -> None:
        self.tally.refuse(refusal)
        self.set_aside.append(
            SetAside(message.subject, message.sequence, refusal, bytes(message.data[:_SET_ASIDE_BYTES]))
        )
        self._log.warning(
            "message set aside",
            subject=message.subject,
            sequence=message.sequence,
            reason=refusal.reason,
            detail=refusal.detail,
        )

    def _apply_batch(
        self, message: StreamMessage, batch: KvEventBatch, *, again: bool = False, hold: bool = True
    ) -> None:
        rank = (batch.worker_id, batch.dp_rank)
        waiting = self._waiting_batches.get(rank)
        if waiting is not None:
            self._keep_waiting(waiting, message)
            if waiting.held_back:
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
                self._log.warning("events refused", worker_id=rank[0], dp_rank=rank[1], reasons=summary.rejected)
            repair = repair_after(summary, was_partial=rank in self._partial)
            if summary.unknown_parents or summary.rejected:
                self._partial.add(rank)
            if repair is None:
                break
            if hold and repair.reason == "gap" and rank not in self._partial and self._hold_back(rank, message):
                break
            self._repair(rank, repair)
            if not repair.reapply:
                break
            again = True
        self._note_lag(rank, batch)
        # What a former incarnation left in the stream says nothing about the rank of today.
        if summary.incarnation == batch.incarnation:
            self._rank_tallies.setdefault(rank, RankTally()).evidence.heard_at = time.monotonic()

    def _hold_back(self, rank: Rank, message: StreamMessage) -> bool:
        """Lets events wait for those that are missing before them, if somebody is there to fetch these."""
        if rank in self._waiting_batches or not self.may_hold(rank):
            return False
        waiting = self._waiting_batches[rank] = Waiting(held_back=True)
        self._keep_waiting(waiting, message)
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
            "rank dropped",
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
                self._log.error("drift persists", worker_id=rank[0], dp_rank=rank[1], next_event_id=place[1])
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
