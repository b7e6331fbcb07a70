"""The blocks of one rank, and their numbered events."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvrouter.core.interface import BlockNote, InvalidEvent, Scope, UnknownParent
from kvrouter.core.reference.block_table import BASE_SCOPE, Block, BlockTable, part_hashes, tier_index
from kvrouter.core.reference.hashing import chain, unpack
from kvrouter.core.reference.rank_blocks import TIERS
from kvrouter.core.reference.state_chunks import dump_chunks, state_chunks
from kvrouter.v1.common_pb2 import BlockRecord, CopyCounting, Cursor, Rank, RankState as RankStateMessage, Tier
from kvrouter.v1.events_pb2 import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from kvrouter.v1.worker_pb2 import GetRankStateResponse

MAX_EVENT_BLOCKS = 8192
"""Maximum number of blocks in one event: 128 KiB of hashes, so that events fill batches of 512 KiB well."""

_FIRST_COPY = [tuple(int(tier == one) for one in TIERS) for tier in TIERS]


class NumberedEvent(NamedTuple):
    """An encoded event with its id."""

    event_id: int
    encoded: bytes
    """A KvEvent."""
    digest: int
    """Digest of the rank's state after the event."""


class RankState:
    """Blocks, digest and event numbers of one rank in one incarnation. Not thread-safe."""

    def __init__(self, incarnation: int, copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED) -> None:
        self.incarnation = incarnation
        """Incarnation of the cache."""
        self.next_event_id = 0
        """Id of the next event."""
        self.unknown_removals = 0
        """Blocks reported as removed but not resident in the tier; such removals are not published."""
        self.unplaced_blocks = 0
        """Blocks reported as copied to a tier but without a place; they are not published."""
        self._blocks = BlockTable(counted=copy_counting != CopyCounting.COPY_COUNTING_SET)
        self._before = (0, 0, 0)

    def __len__(self) -> int:
        """Returns the number of resident blocks, in any tier."""
        return len(self._blocks)

    def __contains__(self, engine_hash: int) -> bool:
        return self._blocks.get(engine_hash) is not None

    def is_resident(self, engine_hash: int, tier: Tier) -> bool:
        """Returns whether a block is resident in a tier."""
        index = tier_index(tier)
        block = self._blocks.get(engine_hash)
        return block is not None and block.copies[index] > 0

    @property
    def device_copies(self) -> int:
        """Number of physical copies of all blocks in device memory."""
        return self._blocks.copies[0]

    def scope_of(self, engine_hash: int) -> Scope | None:
        """Returns the scope of a resident block; None if it is not resident."""
        block = self._blocks.get(engine_hash)
        return None if block is None else block.scope

    def chunk(self, engine_hash: int, blocks: int) -> list[int]:
        """Returns the engine hashes of a chunk of blocks up to this one, in order."""
        chunk: list[int] = []
        while (block := self._blocks.get(engine_hash)) is not None and len(chunk) < blocks:
            chunk.append(engine_hash)
            if block.parent is None or block.parts > 1 or not self._has_parent(block):
                break
            engine_hash = block.parent
        return chunk[::-1]

    @property
    def digest(self) -> int:
        """Sum of the digest terms of all blocks, as KvEventBatch.digest defines it."""
        return self._blocks.digest

    @property
    def cursor(self) -> Cursor:
        """Incarnation and id of the next event."""
        return Cursor(incarnation=self.incarnation, next_event_id=self.next_event_id)

    def blocks(self) -> list[tuple[int, Block]]:
        """Returns (engine hash, block) of all blocks, as a copy."""
        return self._blocks.items()

    def chunks(self, copy_counting: CopyCounting, chunk_blocks: int) -> Iterator[GetRankStateResponse]:
        """Returns the state as of now in chunks. Later changes do not affect the chunks."""
        return state_chunks(self.cursor, self.digest, self.blocks(), copy_counting, chunk_blocks)

    def dump(
        self, rank: Rank, copy_counting: CopyCounting, *, partial: bool, chunk_blocks: int
    ) -> Iterator[RankStateMessage]:
        """Returns the state as of now in chunks of a dump. Later changes do not affect the chunks."""
        blocks = self.blocks()
        return dump_chunks(
            rank, self.cursor, self.digest, blocks, copy_counting, partial=partial, chunk_blocks=chunk_blocks
        )

    def stored(
        self,
        engine_hashes: Sequence[int],
        local_hashes: bytes,
        parent: int | None = None,
        tier: Tier = Tier.TIER_DEVICE,
        *,
        scope: Scope = BASE_SCOPE,
        new_copies: bool = True,
        parts: int = 1,
    ) -> list[NumberedEvent]:
        """Records a chain of blocks. Returns the resulting events."""
        index = tier_index(tier)
        if len(set(engine_hashes)) != len(engine_hashes):
            raise InvalidEvent("expected each engine hash once in a chain, received one twice")
        hashes = [part for engine_hash in engine_hashes for part in part_hashes(engine_hash, parts)]
        if len(local_hashes) != 8 * len(hashes):
            raise InvalidEvent(
                f"expected 8 bytes of local hashes per block ({len(hashes)}), received {len(local_hashes)} bytes"
            )
        if not hashes:
            return []
        place, depth = 0, -1
        if parent is not None:
            if parent in hashes:
                raise InvalidEvent("expected a parent outside of the stored blocks, received one of them")
            above = self._blocks.get(parent)
            if above is None:
                raise UnknownParent(parent)
            place, depth = above.sequence_hash, above.depth
        locals_ = unpack(local_hashes)
        sequences = chain(None if parent is None else place, locals_)
        blocks = []
        for number, (engine_hash, local, sequence) in enumerate(zip(hashes, locals_, sequences, strict=True), start=1):
            own = 1 if number % parts else parts
            block = Block(parent, place, local, sequence, depth + number, _FIRST_COPY[index], scope, own)
            blocks.append((engine_hash, block))
            parent, place = engine_hash, sequence
        return self._store_chains(blocks, index, tier, new_copies=new_copies)

    def stored_in_tier(self, engine_hashes: Iterable[int], tier: Tier) -> list[NumberedEvent]:
        """Records resident blocks in ``tier`` too. Returns the resulting events."""
        index = tier_index(tier)
        blocks = []
        for whole in engine_hashes:
            for engine_hash in self._parts_of(whole):
                block = self._blocks.get(engine_hash)
                if block is None or not self._has_parent(block):
                    self.unplaced_blocks += 1
                else:
                    blocks.append((engine_hash, block._replace(copies=_FIRST_COPY[index])))
        return self._store_chains(blocks, index, tier, new_copies=True)

    def removed(self, engine_hashes: Iterable[int], tier: Tier = Tier.TIER_DEVICE) -> list[NumberedEvent]:
        """Records the removal of blocks, or one physical copy of each, from a tier. Returns the resulting events."""
        index = tier_index(tier)
        events = []
        gone: dict[int, None] = {}
        for engine_hash in [part for whole in engine_hashes for part in self._parts_of(whole)]:
            # A repeated hash means two copies, which need two events.
            if engine_hash in gone or len(gone) == MAX_EVENT_BLOCKS:
                events.append(self._numbered(KvEvent(tier=tier, removed=BlocksRemoved(engine_hashes=gone))))
                gone = {}
            if self._blocks.remove(engine_hash, index):
                gone[engine_hash] = None
            else:
                self.unknown_removals += 1
        if gone:
            events.append(self._numbered(KvEvent(tier=tier, removed=BlocksRemoved(engine_hashes=gone))))
        return events

    def cleared(self, tier: Tier = Tier.TIER_UNSPECIFIED) -> list[NumberedEvent]:
        """Records the removal of all blocks from a tier, or from all for TIER_UNSPECIFIED. Returns the event."""
        if tier == Tier.TIER_UNSPECIFIED:
            self._blocks.clear_all()
        else:
            self._blocks.clear(tier_index(tier))
        return [self._numbered(KvEvent(tier=tier, cleared=BlocksCleared()))]

    def load(self, next_event_id: int, records: Iterable[BlockRecord]) -> None:
        """Fills an empty state from records, in which parents precede children."""
        self.next_event_id = next_event_id
        for record in records:
            parent = record.parent_engine_hash if "parent_engine_hash" in record else None
            above = self._blocks.get(parent)
            held = {each.tier: each.copies for each in record.copies}
            copies = tuple(held.get(tier, 0) for tier in TIERS)
            place = above.sequence_hash if above is not None else 0
            block = Block(parent, place, record.local_hash, record.sequence_hash, record.depth, copies)
            self._blocks.add(record.engine_hash, block)

    def notes(self) -> list[BlockNote]:
        """Returns the notes on all blocks."""
        noted: dict[tuple[Scope, int], list[int]] = {}
        for engine_hash, block in self._blocks.items():
            if block.scope != BASE_SCOPE or block.parts > 1:
                noted.setdefault((block.scope, block.parts), []).append(engine_hash)
        return [(scope, parts, struct.pack(f"<{len(hashes)}Q", *hashes)) for (scope, parts), hashes in noted.items()]

    def annotate(self, notes: Iterable[BlockNote]) -> None:
        """Applies notes to resident blocks; others are ignored."""
        for scope, parts, packed in notes:
            for (engine_hash,) in struct.iter_unpack("<Q", packed):
                block = self._blocks.get(engine_hash)
                if block is not None:
                    self._blocks.replace(engine_hash, block._replace(scope=scope, parts=parts))

    def begin(self) -> None:
        """Begins changes for ``commit`` or ``roll_back``."""
        self._before = (self.next_event_id, self.unknown_removals, self.unplaced_blocks)
        self._blocks.begin()

    def commit(self) -> None:
        """Ends changes, which stay."""
        self._blocks.commit()

    def roll_back(self) -> None:
        """Undoes all changes since ``begin``."""
        self.next_event_id, self.unknown_removals, self.unplaced_blocks = self._before
        self._blocks.roll_back()

    def _numbered(self, event: KvEvent) -> NumberedEvent:
        event.event_id = self.next_event_id
        self.next_event_id += 1
        return NumberedEvent(event.event_id, event.SerializeToString(), self.digest)

    def _store_chains(
        self, blocks: Sequence[tuple[int, Block]], index: int, tier: Tier, *, new_copies: bool
    ) -> list[NumberedEvent]:
        """Stores blocks, and returns an event for each run of consecutive blocks."""
        events = []
        run: list[tuple[int, Block]] = []
        for engine_hash, block in blocks:
            if run and (block.parent != run[-1][0] or len(run) == MAX_EVENT_BLOCKS):
                events.append(self._stored_event(run, tier))
                run = []
            held = self._blocks.get(engine_hash)
            if not new_copies and held and held.sequence_hash == block.sequence_hash and held.copies[index]:
                continue
            self._blocks.store(engine_hash, block, index)
            run.append((engine_hash, block))
        if run:
            events.append(self._stored_event(run, tier))
        return events

    def _stored_event(self, run: Sequence[tuple[int, Block]], tier: Tier) -> NumberedEvent:
        stored = BlocksStored(
            parent_engine_hash=run[0][1].parent,
            engine_hashes=[engine_hash for engine_hash, _ in run],
            local_hashes=[block.local_hash for _, block in run],
        )
        return self._numbered(KvEvent(tier=tier, stored=stored))

    def _parts_of(self, engine_hash: int) -> Sequence[int]:
        """Returns the engine hashes of the parts of an engine's block."""
        block = self._blocks.get(engine_hash)
        return (engine_hash,) if block is None or block.parts == 1 else part_hashes(engine_hash, block.parts)

    def _has_parent(self, block: Block) -> bool:
        if block.parent is None:
            return True
        above = self._blocks.get(block.parent)
        return above is not None and above.sequence_hash == block.parent_place
