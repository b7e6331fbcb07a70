"""The object through which an engine reports the cache changes of one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvrouter.core import EventRecorder, Scope, TokenBuffer, local_hashes, multimodal_hash
from kvrouter.core.interface import RecorderCounts
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import EventsGone, InvalidEvent
from kvrouter.publisher.events import CopyCountingCheck, EngineHash, engine_hash_of, engine_hashes_of
from kvrouter.publisher.publishing.batch_sender import BatchSender
from kvrouter.publisher.publishing.rank_stats import RankStats
from kvrouter.publisher.publishing.transport import Transport
from kvrouter.publisher.snapshots.keeper import SnapshotKeeper
from kvrouter.publisher.snapshots.rank_file import NO_POSITION, RankFile
from kvrouter.v1.common_pb2 import CopyCounting, Cursor, Tier
from kvrouter.v1.events_pb2 import KvEventBatch
from kvrouter.v1.worker_pb2 import GetRankStateResponse

log = get_logger(__name__)


class RankPublisher:
    """Records the blocks of a rank and publishes each change.

    ``stored``, ``removed`` and ``cleared`` may be called from any thread and never wait for NATS. ``run`` sends one
    batch at a time in an event loop.
    """

    def __init__(
        self,
        *,
        subject: str,
        worker_id: int,
        dp_rank: int,
        incarnation: int,
        block_size: int,
        copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED,
        total_blocks: int | None = None,
        buffer_events: int = 200_000,
        buffer_bytes: int = 32 << 20,
        file: RankFile | None = None,
        state_seconds: float = 10.0,
    ) -> None:
        """``total_blocks`` is the rank's capacity in device memory; None if unknown.

        ``buffer_events`` and ``buffer_bytes`` limit the events stored, unsent ones and sent ones together. ``file``
        has the path of the rank's snapshots and what was recovered from it; None for no snapshots. They are written
        every ``state_seconds``.
        """
        self.dp_rank = dp_rank
        """Data-parallel rank."""
        self.incarnation = incarnation
        """Incarnation of the reported cache."""
        self.on_partial: Callable[[], None] | None = None
        """Called when ``is_partial`` has changed; from any thread."""
        self._block_size = block_size
        self._lock = threading.RLock()
        recovered = file.recovered if file else None
        head = (worker_id, dp_rank, incarnation, block_size, copy_counting)
        self._recorder = recovered.recorder if recovered else EventRecorder(head, buffer_events, buffer_bytes)
        self._counts = self._recorder.counts()
        self._check = CopyCountingCheck(dp_rank, copy_counting, total_blocks)
        self.is_partial = self._announced_partial = recovered is not None and recovered.partial
        """Whether blocks may be missing, because events of the engine were lost."""
        self._losses = self._restarts = 0
        self._grouped = False
        self._sender = BatchSender(subject=subject, dp_rank=dp_rank, recorder=self._recorder, lock=self._lock)
        self._keeper = SnapshotKeeper(file, self._recorder, self._lock, state_seconds) if file else None

    def stored(
        self,
        *,
        token_ids: TokenBuffer,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None = None,
        tier: Tier = Tier.TIER_DEVICE,
        scope: Scope | None = None,
        multimodal: Sequence[tuple[int, int | str | bytes]] = (),
        new_copies: bool = True,
        block_size: int = 0,
    ) -> None:
        """Reports stored blocks, each the parent of the next. Only full blocks may be reported.

        Args:
            token_ids: Tokens of these blocks only.
            engine_hashes: The engine's ids of the blocks: numbers of 64 bits, signed or unsigned, or digests.
            parent: Engine hash of the block before the first; None at the start of a sequence.
            tier: Where the blocks are stored.
            scope: Adapter, salt and tenant of the blocks. None for the parent's scope, and
                at the start of a sequence for none.
            multimodal: Pairs (index of the content's first block in this call, id or hash of the content).
                ``kvrouter.core.multimodal_hash`` converts ids.
            new_copies: Whether each block is a new physical copy. False for a report of resident blocks again, such
                as the hits of a request; missing blocks are stored nevertheless.
            block_size: Tokens per engine hash, if the engine stores larger blocks in this tier than the component has:
                a multiple of the component's block size. 0 for the component's.

        Raises:
            InvalidEvent: tokens and hashes do not match; see ``EventRecorder.stored``.
            UnknownParent: the parent is not resident.
        """
        parts, rest = divmod(block_size or self._block_size, self._block_size)
        if rest or parts < 1:
            raise InvalidEvent(f"block_size is {block_size}: expected a multiple of {self._block_size}")
        try:
            blocks = len(engine_hashes) * parts
            if scope is None:
                scope = self._inherited(parent)
            pairs = [(index, multimodal_hash(content)) for index, content in multimodal]
            hashed = local_hashes(token_ids, self._block_size, scope, pairs)
            given = _token_count(token_ids)
        except (ValueError, OverflowError, TypeError) as error:
            if isinstance(error, InvalidEvent):
                raise
            raise InvalidEvent(f"the tokens cannot be hashed: {error}") from error
        if given != blocks * self._block_size:
            raise InvalidEvent(
                f"expected the tokens of {blocks} full blocks of {self._block_size} tokens, received {given} tokens"
            )
        self._store(hashed, engine_hashes, parent, tier, scope, new_copies=new_copies, parts=parts)

    def stored_hashes(
        self,
        *,
        local_hashes: bytes,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None = None,
        tier: Tier = Tier.TIER_DEVICE,
        scope: Scope | None = None,
        new_copies: bool = True,
    ) -> None:
        """Reports stored blocks whose local hashes (packed little-endian u64) are already known.

        ``scope`` is the one in these hashes; None for the parent's.

        Raises:
            InvalidEvent: see ``EventRecorder.stored``.
            UnknownParent: the parent is not resident.
        """
        scope = self._inherited(parent) if scope is None else scope
        self._store(local_hashes, engine_hashes, parent, tier, scope, new_copies=new_copies, parts=1)

    def stored_in_tier(self, engine_hashes: Sequence[EngineHash], *, tier: Tier) -> int:
        """Reports resident blocks in another tier too, for engines without the tokens in such events.

        Returns the number of recorded hashes. Blocks not resident, or whose parents are not,
        cannot be placed; they are counted in the statistics.

        Raises:
            InvalidEvent: a hash does not fit into 64 bits, or the tier is unknown.
        """
        hashes = engine_hashes_of(engine_hashes)
        with self._lock:
            before = self._counts.unplaced_blocks
            counts = self._record(lambda: self._recorder.stored_in_tier(hashes, tier))
            return max(0, len(hashes) - (counts.unplaced_blocks - before))

    def is_resident(self, engine_hash: EngineHash, *, tier: Tier = Tier.TIER_DEVICE) -> bool:
        """Returns whether a block is resident in a tier, according to the reports.

        Raises:
            InvalidEvent: the hash does not fit into 64 bits, or the tier is unknown.
        """
        with self._lock:
            return bool(self._recorder.resident([engine_hash_of(engine_hash)], tier))

    def chunk(self, engine_hash: EngineHash, blocks: int) -> list[int]:
        """Returns the engine hashes of a chunk of blocks that ends with this one; see ``EventRecorder.chunk``.

        For engines naming a chunk of blocks by its last one.
        """
        with self._lock:
            return self._recorder.chunk(engine_hash_of(engine_hash), blocks)

    def removed(self, engine_hashes: Sequence[EngineHash], *, tier: Tier = Tier.TIER_DEVICE) -> None:
        """Reports blocks gone from a tier: one copy of each with counted copies, otherwise the whole block.

        Blocks not resident there are counted and change nothing.

        Raises:
            InvalidEvent: a hash does not fit into 64 bits, or the tier is unknown.
        """
        hashes = engine_hashes_of(engine_hashes)
        with self._lock:
            before = self._counts.unknown_removals
            if self._record(lambda: self._recorder.removed(hashes, tier)).unknown_removals > before:
                self._check.removed_unknown(hashes, self._recorder, tier)

    def cleared(self, *, tier: Tier = Tier.TIER_UNSPECIFIED) -> None:
        """Reports an emptied tier, or all of them for TIER_UNSPECIFIED.

        After a loss of events, the latter makes the rank complete again.

        Raises:
            InvalidEvent: the tier is unknown.
        """
        with self._lock:
            self._clear(tier, partial=self.is_partial and tier != Tier.TIER_UNSPECIFIED)

    def events_lost(self, *, removals: bool = True) -> None:
        """Reports a loss of the engine's events.

        If removals may be among them, all blocks are dropped. Later reports are published, but the rank
        is partial: blocks below lost ones are unknown. ``cleared`` and ``restarted`` make it complete again.
        """
        with self._lock:
            is_news = removals or not self.is_partial
            self._losses += is_news
            if removals:
                self._clear(Tier.TIER_UNSPECIFIED, partial=True)
            elif is_news:
                self.is_partial = True
                self._record(self._recorder.counts)
        if is_news:
            log.warning("publish.engine_events_lost", rank=self.dp_rank, dropped=removals)

    def restarted(self) -> None:
        """Reports a restart of this rank's engine with an empty cache, while the other ranks continue."""
        with self._lock:
            self._restarts += 1
            self._clear(Tier.TIER_UNSPECIFIED, partial=False)
        log.info("publish.engine_restarted", rank=self.dp_rank)

    @contextmanager
    def reporting(self, position: int) -> Iterator[None]:
        """Groups all reports in the body as the engine's message of this number, which starts at 0 and rises.

        A message counts entirely or not at all: a restarted relay resumes after the number of the last completed body,
        and if the body raises, none of its reports is recorded. Other threads wait meanwhile before they can report, so
        the body should be quick.
        """
        with self._lock:
            if self._grouped:
                raise InvalidEvent("expected no reporting() inside of another one")
            with self._group(position):
                yield

    def _inherited(self, parent: EngineHash | None) -> Scope:
        if parent is None:
            return Scope()
        with self._lock:
            # An unknown parent is refused later.
            return self._recorder.scope_of(engine_hash_of(parent)) or Scope()

    def _store(
        self,
        hashed: bytes,
        engine_hashes: Sequence[EngineHash],
        parent: EngineHash | None,
        tier: Tier,
        scope: Scope,
        *,
        new_copies: bool,
        parts: int,
    ) -> None:
        hashes = engine_hashes_of(engine_hashes)
        above = None if parent is None else engine_hash_of(parent)
        with self._lock:
            self._check.storing(hashes, self._recorder, tier)
            counts = self._record(
                lambda: self._recorder.stored(
                    hashes, hashed, above, tier, scope=scope, new_copies=new_copies, parts=parts
                )
            )
            self._check.stored(counts, tier)

    def _clear(self, tier: Tier, *, partial: bool) -> None:
        def clear() -> RecorderCounts:
            counts = self._recorder.cleared(tier)
            self.is_partial = partial
            return counts

        self._record(clear)
        self._check.cleared()

    def _record(self, report: Callable[[], RecorderCounts]) -> RecorderCounts:
        """Makes a report. Returns the numbers after it. The caller owns the lock."""
        before = self._counts
        self._counts = report()
        if not self._grouped:
            self._note(NO_POSITION)
            self._announce(before)
        return self._counts

    @contextmanager
    def _group(self, position: int) -> Iterator[None]:
        """Groups the reports in the body; undoes them if it raises. The caller owns the lock."""
        before = self._counts
        partial, losses, restarts = self.is_partial, self._losses, self._restarts
        self._grouped = True
        self._recorder.begin()
        try:
            yield
        except BaseException:
            self._recorder.roll_back()
            self._counts = before
            self.is_partial, self._losses, self._restarts = partial, losses, restarts
            raise
        finally:
            self._grouped = False
        self._recorder.commit()
        self._note(position)
        self._announce(before)

    def _note(self, position: int) -> None:
        if self._keeper is not None:
            self._keeper.note(position, partial=self.is_partial)

    def _announce(self, before: RecorderCounts) -> None:
        """Tells others of changes since ``before``."""
        if self.is_partial != self._announced_partial:
            self._announced_partial = self.is_partial
            if self.on_partial is not None:
                self.on_partial()
        if self._counts.next_event_id != before.next_event_id:
            self._sender.wake()

    def state_chunks(self, chunk_blocks: int = 4096) -> Iterator[GetRankStateResponse]:
        """Returns the rank's state as of now in chunks. Later changes do not affect the chunks."""
        with self._lock:
            return map(GetRankStateResponse.FromString, self._recorder.state_chunks(chunk_blocks))

    def is_current(self, cursor: Cursor) -> bool:
        """Returns whether a cursor is at the end of the recorded events, so that there are none from it on."""
        return cursor.incarnation == self.incarnation and cursor.next_event_id == self._counts.next_event_id

    def events(self, start: Cursor, until_event_id: int = 0) -> Iterator[KvEventBatch]:
        """Returns the events from a cursor to below ``until_event_id`` (0 for all) in batches; none if up to date.

        Raises:
            EventsGone: the cursor is of another incarnation, or its event is no longer stored or does not exist yet.
        """
        if start.incarnation != self.incarnation:
            raise EventsGone(f"expected a cursor of incarnation {self.incarnation}, received {start.incarnation}")
        with self._lock:
            return map(KvEventBatch.FromString, self._recorder.batches(start.next_event_id, until_event_id))

    async def run(
        self, transport: Transport, *, heartbeat_seconds: float, max_batch_bytes: Callable[[], int] | None = None
    ) -> None:
        """Sends events until cancelled; see ``BatchSender.run``."""
        await self._sender.run(transport, heartbeat_seconds=heartbeat_seconds, max_batch_bytes=max_batch_bytes)

    async def flush(self) -> None:
        """Waits until all recorded events are sent, which needs ``run`` to be running."""
        await self._sender.flush()

    async def save_periodically(self) -> None:
        """Writes snapshots at intervals until cancelled; returns at once without a file."""
        if self._keeper is not None:
            await self._keeper.run()

    async def save(self) -> None:
        """Writes a snapshot now, if there is a file and the rank has changed."""
        if self._keeper is not None:
            await self._keeper.save()

    def stats(self) -> RankStats:
        """Returns the current statistics."""
        with self._lock:
            counts = self._recorder.counts()
            return RankStats(
                dp_rank=self.dp_rank,
                incarnation=self.incarnation,
                next_event_id=counts.next_event_id,
                digest=counts.digest,
                blocks=counts.blocks,
                partial=self.is_partial,
                events_lost=self._losses,
                restarts=self._restarts,
                unknown_removals=counts.unknown_removals,
                unplaced_blocks=counts.unplaced_blocks,
                copy_counting_doubts=self._check.doubts,
                batches_sent=self._sender.batches_sent,
                heartbeats_sent=self._sender.heartbeats_sent,
                bytes_sent=self._sender.bytes_sent,
                retries=self._sender.retries,
                events_dropped=counts.dropped_events + self._sender.refused,
                unsent_events=counts.unsent_events,
                unsent_bytes=counts.unsent_bytes,
                waiting_seconds=self._sender.waiting_seconds,
                waiting_reason=self._sender.waiting_reason,
                state_age_seconds=self._keeper.age_seconds if self._keeper else None,
                state_failures=self._keeper.failures if self._keeper else 0,
            )


def _token_count(token_ids: TokenBuffer) -> int:
    """Returns the number of tokens; bytes hold four to a token."""
    count = len(token_ids)
    return count // 4 if isinstance(token_ids, bytes | bytearray) else count
