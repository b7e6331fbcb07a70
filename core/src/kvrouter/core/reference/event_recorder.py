"""Records the blocks of one rank, and hands out the events to send."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError
from kvrouter.core.interface import MAX_BATCH_BYTES, BatchHead, BlockNote, RecorderCounts, Scope
from kvrouter.core.reference.block_table import BASE_SCOPE
from kvrouter.core.reference.event_log import EventLog
from kvrouter.core.reference.rank_state import NumberedEvent, RankState
from kvrouter.v1.common_pb2 import Rank, RankState as RankStateMessage, Tier
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch


class EventRecorder:
    """Implements ``kvrouter.core.interface.EventRecorder``. Not thread-safe."""

    def __init__(self, head: BatchHead, max_events: int, max_bytes: int) -> None:
        worker_id, dp_rank, incarnation, block_size, copy_counting = head
        self._head = KvEventBatch(
            worker_id=worker_id,
            dp_rank=dp_rank,
            incarnation=incarnation,
            block_size=block_size,
            copy_counting=copy_counting,
        )
        self._state = RankState(incarnation, self._head.copy_counting)
        self._log = EventLog(max_events, max_bytes)
        self._pending: list[NumberedEvent] | None = None

    def counts(self) -> RecorderCounts:
        """Returns the current numbers."""
        state, log = self._state, self._log
        return RecorderCounts(
            next_event_id=state.next_event_id,
            digest=state.digest,
            blocks=len(state),
            device_copies=state.device_copies,
            unknown_removals=state.unknown_removals,
            unplaced_blocks=state.unplaced_blocks,
            unsent_events=log.unsent,
            unsent_bytes=log.unsent_bytes,
            dropped_events=log.dropped,
        )

    def resident(self, engine_hashes: Sequence[int], tier: Tier) -> list[int]:
        """Returns the resident ones of these blocks in a tier."""
        return [engine_hash for engine_hash in engine_hashes if self._state.is_resident(engine_hash, tier)]

    def scope_of(self, engine_hash: int) -> Scope | None:
        """Returns the scope of a resident block; None if it is not resident."""
        return self._state.scope_of(engine_hash)

    def chunk(self, engine_hash: int, blocks: int) -> list[int]:
        """Returns the engine hashes of a chunk of blocks up to this one, in order."""
        return self._state.chunk(engine_hash, blocks)

    def stored(
        self,
        engine_hashes: Sequence[int],
        local_hashes: bytes,
        parent: int | None,
        tier: Tier,
        *,
        scope: Scope = BASE_SCOPE,
        new_copies: bool = True,
        parts: int = 1,
    ) -> RecorderCounts:
        """Records a chain of blocks. Returns the numbers after it."""
        return self._record(
            self._state.stored(
                engine_hashes, local_hashes, parent, tier, scope=scope, new_copies=new_copies, parts=parts
            )
        )

    def stored_in_tier(self, engine_hashes: Sequence[int], tier: Tier) -> RecorderCounts:
        """Records resident blocks in ``tier`` too. Returns the numbers after it."""
        return self._record(self._state.stored_in_tier(engine_hashes, tier))

    def removed(self, engine_hashes: Sequence[int], tier: Tier) -> RecorderCounts:
        """Records the removal of blocks, or one physical copy of each, from a tier. Returns the numbers after it."""
        return self._record(self._state.removed(engine_hashes, tier))

    def cleared(self, tier: Tier) -> RecorderCounts:
        """Records the removal of all blocks from a tier, or from all. Returns the numbers after it."""
        return self._record(self._state.cleared(tier))

    def begin(self) -> None:
        """Begins a group of reports. Its events wait for ``commit``."""
        self._state.begin()
        self._pending = []

    def commit(self) -> None:
        """Ends the group: appends its events to the log."""
        self._state.commit()
        events, self._pending = self._pending, None
        self._log.extend(events or ())

    def roll_back(self) -> None:
        """Undoes the group."""
        self._state.roll_back()
        self._pending = None

    def take_batch(self, max_bytes: int) -> tuple[int, int, bytes]:
        """Takes the next events to send. Returns the first id, the id after the last, and an encoded batch."""
        events = self._log.take(min(max_bytes, MAX_BATCH_BYTES))
        next_event_id = self._state.next_event_id
        if events:
            return events[0].event_id, events[-1].event_id + 1, self._encoded(events)
        return next_event_id, next_event_id, self._encoded(events)

    def batches(self, from_event_id: int, until_event_id: int = 0) -> Iterator[bytes]:
        """Returns encoded batches with the events of the log from an id to below another, 0 for all."""
        if from_event_id == self._state.next_event_id:
            return iter(())
        return map(self._encoded, self._log.since(from_event_id, until_event_id, MAX_BATCH_BYTES))

    def state_chunks(self, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Returns the blocks as of now as encoded GetRankStateResponses."""
        chunks = self._state.chunks(self._head.copy_counting, chunk_blocks)
        return (chunk.SerializeToString() for chunk in chunks)

    def dump(self, partial: bool, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Returns the blocks as of now as encoded RankState messages."""
        rank = Rank(worker_id=self._head.worker_id, dp_rank=self._head.dp_rank)
        chunks = self._state.dump(rank, self._head.copy_counting, partial=partial, chunk_blocks=chunk_blocks)
        return (chunk.SerializeToString() for chunk in chunks)

    def notes(self) -> list[BlockNote]:
        """Returns the notes on all blocks."""
        return self._state.notes()

    def load(self, chunks: Sequence[bytes]) -> None:
        """Fills an empty recorder from the chunks of a dump."""
        for encoded in chunks:
            try:
                chunk = RankStateMessage.FromString(encoded)
            except DecodeError as error:
                raise ValueError(f"the chunk cannot be decoded: {error}") from None
            self._state.load(chunk.cursor.next_event_id, chunk.blocks)

    def annotate(self, notes: Sequence[BlockNote]) -> None:
        """Applies notes to resident blocks; others are ignored."""
        self._state.annotate(notes)

    def _record(self, events: list[NumberedEvent]) -> RecorderCounts:
        if self._pending is None:
            self._log.extend(events)
        else:
            self._pending += events
        return self.counts()

    def _encoded(self, events: Sequence[NumberedEvent]) -> bytes:
        next_event_id, digest = self._state.next_event_id, self._state.digest
        if events:
            next_event_id, digest = events[-1].event_id + 1, events[-1].digest
        batch = KvEventBatch(next_event_id=next_event_id, digest=digest, published_unix_ns=time.time_ns())
        batch.MergeFrom(self._head)
        batch.events.extend(KvEvent.FromString(event.encoded) for event in events)
        return batch.SerializeToString()
