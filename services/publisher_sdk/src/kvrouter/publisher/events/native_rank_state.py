"""The rank state of the Rust core, which the C library uses too, with the interface of the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvrouter.core import RANK_STATE, Scope
from kvrouter.publisher.errors import InvalidEvent, UnknownParent
from kvrouter.publisher.events.blocks import BASE_SCOPE, Block, BlockNote, NumberedEvent
from kvrouter.publisher.events.engine_hashes import EngineHash, engine_hash_of, engine_hashes_of
from kvrouter.publisher.events.rank_state import RankState
from kvrouter.publisher.events.state_chunks import CHUNK_BLOCKS
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from kvrouter.v1.worker_pb2 import BlockRecord, GetRankStateResponse

_T = TypeVar("_T")
_CoreBlock = tuple[int | None, int, int, int, int, tuple[int, ...], tuple[str, str, str], int]


class NativeRankState(RankState):
    """Converts between the SDK's types and those of the core. Not thread-safe."""

    def __init__(self, incarnation: int, copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED) -> None:
        """Makes an empty state; only where ``kvrouter.core.RANK_STATE`` is set."""
        self.incarnation = incarnation
        self._core = RANK_STATE(incarnation, copy_counting != CopyCounting.COPY_COUNTING_SET)
        self._read_counts()

    def __len__(self) -> int:
        return len(self._core)

    def __contains__(self, engine_hash: EngineHash) -> bool:
        return self._core.block(engine_hash_of(engine_hash)) is not None

    def is_resident(self, engine_hash: EngineHash, tier: Tier) -> bool:
        """Returns whether a block is resident in a tier; see ``RankState``."""
        return bool(_checked(lambda: self._core.is_resident(engine_hash_of(engine_hash), tier)))

    def copies_in(self, tier: Tier) -> int:
        """Returns the number of physical copies of all blocks in a tier."""
        return int(_checked(lambda: self._core.copies_in(tier)))

    def scope_of(self, engine_hash: EngineHash) -> Scope | None:
        """Returns the scope of a resident block; None if it is not resident."""
        found = self._core.block(engine_hash_of(engine_hash))
        return None if found is None else _block(found).scope

    def chunk(self, engine_hash: EngineHash, blocks: int) -> list[int]:
        """Returns the engine hashes of a chunk of blocks that ends with this one; see ``RankState``."""
        return list(self._core.chunk(engine_hash_of(engine_hash), blocks))

    @property
    def digest(self) -> int:
        """Sum of the digest terms of all blocks, as KvEventBatch.digest defines it."""
        return int(self._core.digest)

    def blocks(self) -> list[tuple[int, Block]]:
        """Returns (engine hash, block) of all blocks, as a copy."""
        return [(engine_hash, _block(found)) for engine_hash, found in self._core.blocks()]

    def chunks(self, copy_counting: CopyCounting, chunk_blocks: int = CHUNK_BLOCKS) -> Iterator[GetRankStateResponse]:
        """Returns the state as of now in chunks. Later changes do not affect the chunks."""
        return map(GetRankStateResponse.FromString, self._core.chunks(copy_counting, chunk_blocks))

    def stored(
        self,
        engine_hashes: Iterable[EngineHash],
        local_hashes: bytes,
        parent: EngineHash | None = None,
        tier: Tier = Tier.TIER_DEVICE,
        *,
        scope: Scope = BASE_SCOPE,
        new_copies: bool = True,
        parts: int = 1,
    ) -> list[NumberedEvent]:
        """Records a chain of blocks; see ``RankState``."""
        named, above = engine_hashes_of(engine_hashes), None if parent is None else engine_hash_of(parent)
        return self._numbered_events(
            lambda: self._core.stored(named, local_hashes, above, tier, _parts(scope), new_copies, parts)
        )

    def stored_known(self, engine_hashes: Iterable[EngineHash], tier: Tier) -> list[NumberedEvent]:
        """Records that resident blocks are now in ``tier`` too; see ``RankState``."""
        named = engine_hashes_of(engine_hashes)
        return self._numbered_events(lambda: self._core.stored_known(named, tier))

    def removed(self, engine_hashes: Iterable[EngineHash], tier: Tier = Tier.TIER_DEVICE) -> list[NumberedEvent]:
        """Records that blocks, or one physical copy of each, left a tier; see ``RankState``."""
        named = engine_hashes_of(engine_hashes)
        return self._numbered_events(lambda: self._core.removed(named, tier))

    def cleared(self, tier: Tier = Tier.TIER_UNSPECIFIED) -> list[NumberedEvent]:
        """Records that all blocks left a tier, or every tier for TIER_UNSPECIFIED; see ``RankState``."""
        return self._numbered_events(lambda: self._core.cleared(tier))

    def load(self, next_event_id: int, records: Iterable[BlockRecord]) -> None:
        """Fills an empty state; see ``RankState``."""
        self._core.load(next_event_id, [record.SerializeToString() for record in records])
        self._read_counts()

    def notes(self, engine_hashes: Iterable[int] | None = None) -> list[BlockNote]:
        """Returns what a journal must add to the blocks' records; see ``RankState``."""
        chosen = self.blocks() if engine_hashes is None else self._resident(engine_hashes)
        noted: dict[tuple[Scope, int], list[int]] = {}
        for engine_hash, block in chosen:
            if block.scope != BASE_SCOPE or block.parts > 1:
                noted.setdefault((block.scope, block.parts), []).append(engine_hash)
        return [BlockNote(scope, parts, hashes) for (scope, parts), hashes in noted.items()]

    def annotate(self, notes: Iterable[BlockNote]) -> None:
        """Applies notes of a journal to resident blocks; others are ignored."""
        for scope, parts, hashes in notes:
            self._core.annotate(hashes, _parts(scope), parts)

    def begin(self) -> None:
        """Begins changes that ``roll_back`` can undo."""
        self._core.begin()

    def commit(self) -> None:
        """Ends changes, which stay."""
        self._core.commit()

    def roll_back(self) -> None:
        """Undoes all changes since ``begin``."""
        self._core.roll_back()
        self._read_counts()

    def _resident(self, engine_hashes: Iterable[int]) -> list[tuple[int, Block]]:
        found = ((engine_hash, self._core.block(engine_hash)) for engine_hash in engine_hashes)
        return [(engine_hash, _block(block)) for engine_hash, block in found if block is not None]

    def _numbered_events(self, change: Callable[[], list[tuple[int, bytes, int]]]) -> list[NumberedEvent]:
        events = _checked(change)
        self._read_counts()
        return [NumberedEvent(*event) for event in events]

    def _read_counts(self) -> None:
        self.next_event_id, self.unknown_removals, self.unplaced_blocks = self._core.counts()


def make_rank_state(incarnation: int, copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED) -> RankState:
    """Returns an empty rank state of the Rust core, or the reference where that is not built."""
    return (RankState if RANK_STATE is None else NativeRankState)(incarnation, copy_counting)


def _checked(call: Callable[[], _T]) -> _T:
    try:
        return call()
    except KeyError as error:
        raise UnknownParent(error.args[0]) from None
    except ValueError as error:
        if isinstance(error, InvalidEvent):
            raise
        raise InvalidEvent(str(error)) from None


def _block(found: _CoreBlock) -> Block:
    parent, parent_place, local_hash, sequence_hash, depth, copies, scope, parts = found
    return Block(parent, parent_place, local_hash, sequence_hash, depth, copies, Scope(*scope), parts)


def _parts(scope: Scope) -> tuple[str, str, str]:
    return scope.lora_name, scope.cache_salt, scope.tenant
