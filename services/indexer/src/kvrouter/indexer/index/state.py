"""The index of one component, and changes of whole ranks: loads, repairs, new incarnations and departures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from kvrouter.core.interface import PrefixIndex, Rank
from kvrouter.indexer.index.event_applier import EventApplier
from kvrouter.indexer.index.incarnations import NewIncarnation
from kvrouter.indexer.index.known_ranks import KnownRanks
from kvrouter.indexer.index.messages import ReceivedBatch
from kvrouter.indexer.index.rank_reset import ResyncPolicy, reset_after
from kvrouter.indexer.index.shared_index import SharedIndex
from kvrouter.net.decoding import Quarantine

log = structlog.get_logger(component="indexer")


@dataclass(frozen=True, slots=True)
class RankDump:
    """The whole state of a rank."""

    rank: Rank
    cursor: tuple[int, int]
    """(incarnation, next event id)"""
    partial: bool
    chunks: list[bytes]
    """Encoded RankState messages; the last one has ``last`` set."""


class StaleDump(Exception):
    """Raised when the index is ahead of a dump: loading the dump would lose events, which are not sent again."""

    def __init__(self, rank: Rank, cursor: tuple[int, int], known: tuple[int, int]) -> None:
        super().__init__(f"rank {rank}: the dump is at (incarnation, event) {cursor}, the index at {known}")


@dataclass(frozen=True, slots=True)
class RepairStart:
    """State of a rank before the call to its worker."""

    cursor: tuple[int, int] | None
    """None if the rank is not in the index."""
    is_partial: bool
    """Whether blocks of it may be missing in the index."""
    claims: tuple[int, ...]
    """Unconfirmed incarnations of events."""


class RankRepair:
    """Keeps the ranks of a shared index consistent with the workers of their component."""

    def __init__(
        self, component: str, shared: SharedIndex, events: EventApplier, known: KnownRanks, policy: ResyncPolicy
    ) -> None:
        """Creates a repair.

        Args:
            component: Name of the component, for logs.
            shared: The index.
            events: Applies the events after a repair.
            known: Status of the ranks.
            policy: Requests and defers resyncs.
        """
        self._shared = shared
        self._events = events
        self._known = known
        self._policy = policy
        self._log = log.bind(component_name=component)

    async def whole_rank(self, rank: Rank) -> RankDump | None:
        """Returns the present state of a rank; None if it is not in the index."""

        def begin(index: PrefixIndex) -> RankDump | None:
            cursor = index.cursor(rank)
            if cursor is None:
                return None
            return RankDump(rank, cursor, self._known.is_partial(rank), list(index.dump_rank(rank)))

        return await self._shared.change(begin)

    async def load_rank(self, dump: RankDump, *, goes_back: bool = False) -> int:
        """Replaces a rank by a dump, unless the index is ahead of it. Returns the number of entries loaded.

        A partial dump also requests a resync of the rank. With ``goes_back``, a rank of the same incarnation may be
        ahead: the caller will fetch the later events.

        Raises:
            StaleDump: the index is ahead of the dump, or has the same cursor and is complete while the dump is partial;
                or the dump's incarnation is later than the worker's.
            InvalidDump: the dump cannot be loaded; the index is unchanged.
        """

        def load(index: PrefixIndex) -> int:
            known = index.cursor(dump.rank)
            current = self._events.incarnations.current(dump.rank)
            if current is not None and dump.cursor[0] > current:
                raise StaleDump(dump.rank, dump.cursor, known or (current, 0))
            may_go_back = goes_back and known is not None and known[0] == dump.cursor[0]
            is_complete = not self._known.is_partial(dump.rank)
            if known is not None and not may_go_back and (known, is_complete) > (dump.cursor, not dump.partial):
                raise StaleDump(dump.rank, dump.cursor, known)
            blocks = self._load(index, dump)
            if dump.partial:
                self._known.mark_unverified(dump.rank)
                self._policy.request(dump.rank, "partial")
            return blocks

        return await self._shared.change(load)

    async def begin_repair(self, rank: Rank) -> RepairStart:
        """Starts to keep the rank's events in its pending buffer, until the repair ends.

        A registered rank that the index does not have yet starts empty, so its worker is asked for its events.
        """

        def begin(index: PrefixIndex) -> RepairStart:
            if index.cursor(rank) is None and (incarnation := self._events.incarnations.current(rank)) is not None:
                self._begin_incarnation(index, rank, incarnation)
            self._events.pending.open(rank, retained=False).mark_requested()
            is_partial = self._known.is_partial(rank) or index.is_evicted(rank)
            return RepairStart(index.cursor(rank), is_partial, self._events.incarnations.claims(rank))

        return await self._shared.change(begin, at_once=True)

    async def apply_fetched(self, rank: Rank, batches: Sequence[bytes]) -> bool:
        """Applies encoded batches fetched from the worker. Returns whether all applied without a gap or fault."""

        def apply(index: PrefixIndex) -> bool:
            for batch in batches:
                summary = index.apply(batch)
                self._events.tally.add(summary, again=True)
                self._events.note_evictions(rank, summary)
                reset = reset_after(summary, was_partial=self._known.is_partial(rank))
                if reset is not None and reset.reason != "gap":
                    self._events.drop(index, rank, reset)
                if summary.unparsable or reset is not None:
                    return False
            return True

        return await self._shared.change(apply, at_once=not batches)

    async def replace_rank(self, dump: RankDump, reason: str, claims: Sequence[int] = ()) -> int:
        """Replaces a rank by its worker's state, then applies the pending events. Returns the entries loaded.

        The worker's incarnation and cursor replace those of the index, whether they are higher or lower.

        Args:
            dump: The worker's answer.
            reason: Reason of the resync.
            claims: Unconfirmed incarnations from before the call to the worker.

        Raises:
            InvalidDump: the answer cannot be loaded; the index is unchanged.
        """

        def replace(index: PrefixIndex) -> int:
            before = index.cursor(dump.rank)
            buffer = self._events.pending.get(dump.rank)
            has_hole = buffer is not None and buffer.dropped > 0
            blocks = self._load(index, dump)
            self._confirm(dump.rank, dump.cursor[0], claims)
            self._finish(index, dump.rank, reason)
            reached = index.cursor(dump.rank)
            if has_hole and before is not None and reached is not None and before[0] == reached[0] and before > reached:
                # Batches dropped because of the bound are missing between the worker's state and the former cursor.
                self._policy.request(dump.rank, "gap")
            return blocks

        return await self._shared.change(replace)

    async def confirm_rank(
        self, rank: Rank, incarnation: int, reason: str, claims: Sequence[int], *, news: bool = True
    ) -> int:
        """Ends the repair of a confirmed rank: applies the pending events.

        Args:
            rank: The rank. Its missing events are applied already.
            incarnation: Its incarnation by the worker's answer.
            reason: Reason of the resync.
            claims: Unconfirmed incarnations from before the call to the worker.
            news: Whether the worker had events missing in the index.

        Returns:
            Number of claims refuted by the worker: incarnations, and batches with ids above its cursor.
        """

        def confirm(index: PrefixIndex) -> int:
            return self._confirm(rank, incarnation, claims) + self._finish(index, rank, reason, news=news)

        pending = self._events.pending.get(rank)
        return await self._shared.change(confirm, at_once=pending is None or not pending.bytes)

    async def give_up_repair(self, rank: Rank) -> None:
        """Ends a failed repair: applies the pending events. A gap among them empties the rank."""

        def give_up(index: PrefixIndex) -> None:
            self._known.mark_unverified(rank)
            buffer = self._events.pending.get(rank)
            was_retained = buffer is not None and buffer.retained
            for received in self._events.take_pending(rank):
                if was_retained:
                    self._events.apply_batch(index, received, again=True, retain=False)

        await self._shared.change(give_up)

    async def mark_unverified(self, ranks: Sequence[Rank]) -> None:
        """Marks ranks as not verified."""

        def mark(_: PrefixIndex) -> None:
            for rank in ranks:
                self._known.mark_unverified(rank)

        if ranks:
            await self._shared.change(mark)

    async def begin_incarnations(self, incarnations: Sequence[NewIncarnation]) -> None:
        """Empties ranks registered with a later incarnation than the index has, and starts them at event 0."""

        def begin(index: PrefixIndex) -> None:
            for new in incarnations:
                rank, cursor = new.rank, index.cursor(new.rank)
                # A resync may have found another incarnation in the meantime.
                is_current = self._events.incarnations.current(rank) in (None, new.incarnation)
                if is_current and (cursor is None or cursor[0] < new.incarnation):
                    self._begin_incarnation(index, rank, new.incarnation)

        if incarnations:
            await self._shared.change(begin)

    async def forget(self, ranks: Sequence[Rank]) -> None:
        """Removes ranks whose worker is gone."""

        def drop(index: PrefixIndex) -> None:
            for rank in ranks:
                dropped = index.remove_rank(rank)
                self._known.forget(rank)
                self._events.pending.take(rank)
                self._events.incarnations.forget(rank)
                self._log.info("rank.removed", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped)

        if ranks:
            await self._shared.change(drop)

    def _begin_incarnation(self, index: PrefixIndex, rank: Rank, incarnation: int) -> None:
        dropped = index.reset_rank(rank, incarnation, 0, partial=False)
        self._known.set_partial(rank, False)
        self._known.mark_unverified(rank)
        self._log.info("rank.incarnation_started", worker_id=rank[0], dp_rank=rank[1], dropped_blocks=dropped)

    def _load(self, index: PrefixIndex, dump: RankDump) -> int:
        before = {info[:2] for info in index.ranks() if info.evicted} - {dump.rank}
        blocks = index.load_rank(dump.chunks)
        self._known.set_partial(dump.rank, dump.partial)
        for info in index.ranks():
            if info.evicted and info[:2] not in before:
                self._events.note_eviction(info[:2], 0)
        return blocks

    def _confirm(self, rank: Rank, incarnation: int, claims: Sequence[int]) -> int:
        refuted = self._events.incarnations.confirm(rank, incarnation, claims)
        if refuted:
            self._log.warning(
                "rank.incarnations_refuted",
                worker_id=rank[0],
                dp_rank=rank[1],
                incarnation=incarnation,
                refuted=refuted,
            )
        return len(refuted)

    def _finish(self, index: PrefixIndex, rank: Rank, reason: str, *, news: bool = True) -> int:
        """Applies the pending events. Returns the number of batches with ids above the worker's cursor."""
        tally = self._known.tally(rank)
        tally.verified = not self._known.is_partial(rank)
        tally.evidence.compared_at = time.monotonic()
        if news:
            tally.evidence.news_at = tally.evidence.compared_at
        if news or reason not in ("silent", "behind"):
            tally.resynced_unix_ns, tally.resync_reason = time.time_ns(), reason
        buffer = self._events.pending.get(rank)
        requested = buffer.requested if buffer is not None else 0
        unknown = 0
        for place, received in enumerate(self._events.take_pending(rank)):
            if place < requested and _is_ahead(index, received):
                unknown += 1
                self._events.quarantine_batch(
                    received, "unconfirmed_event", "the worker has not reached these event ids"
                )
            else:
                self._events.apply_batch(index, received, again=True)
        return unknown


def _is_ahead(index: PrefixIndex, received: ReceivedBatch) -> bool:
    """Returns whether a batch names event ids after the cursor of its rank."""
    batch = received.batch
    cursor = index.cursor(batch.rank)
    return cursor is not None and batch.incarnation == cursor[0] and batch.reached > cursor[1]


class IndexState:
    """A shared index, the applier of its events, and the repair of its ranks."""

    def __init__(
        self,
        component: str,
        block_size: int,
        index: PrefixIndex,
        policy: ResyncPolicy,
        quarantine: Quarantine | None = None,
    ) -> None:
        """Composes the state of an empty index.

        Args:
            component: Name of the component, for logs.
            block_size: Tokens per block of the component.
            index: The prefix index.
            policy: Requests and defers resyncs.
            quarantine: Counts and logs undecodable input; None for one of its own.
        """
        self.known = KnownRanks()
        self.shared = SharedIndex(index)
        self.events = EventApplier(
            component, block_size, self.shared, self.known, policy, Quarantine() if quarantine is None else quarantine
        )
        self.repair = RankRepair(component, self.shared, self.events, self.known, policy)
