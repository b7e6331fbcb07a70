"""Batches, dumps and answers in few words."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from kvrouter.core.interface import LoadColumns, Rank
from kvrouter.core.reference import sequence_hashes
from kvrouter.v1.common_pb2 import CopyCounting, RankState
from kvrouter.v1.events_pb2 import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from xxhash import xxh3_64_intdigest

RANK = (7, 0)
DEVICE, HOST, DISK, SHARED, CHECKPOINT = 1, 2, 3, 4, 5
COUNTED, SET = CopyCounting.COPY_COUNTING_COUNTED, CopyCounting.COPY_COUNTING_SET
LAST_ID = (1 << 64) - 1


class BookingRequest(NamedTuple):
    """The arguments of ``ActiveSequences.book``."""

    key: tuple[str, int, int]
    rank: Rank
    sequence_hashes: bytes
    prompt_tokens: int
    prefill_tokens: int
    track_blocks: bool = True
    unique_blocks: bool = False


def packed(hashes: Iterable[int]) -> bytes:
    numbers = list(hashes)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpacked(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


def load_rows(columns: LoadColumns) -> list[tuple[Rank, int, int, int, int]]:
    """The ranks, each with active blocks, prefill tokens, requests, and leading active blocks."""
    ranks, data = columns
    numbers = memoryview(data).cast("q").tolist()
    n = len(ranks)
    return list(zip(ranks, *(numbers[c * n : (c + 1) * n] for c in range(4)), strict=True))


_FACTS = attrgetter(
    *("worker_id", "dp_rank", "incarnation", "next_event_id", "new_incarnation", "applied", "duplicates", "fenced"),
    *("gap", "stored_blocks", "removed_blocks", "unknown_parents", "unknown_removals", "digest_differs", "is_plain"),
)


def said(summary: Any) -> tuple[Any, ...]:
    """A summary of an applied batch without the words of its reasons."""
    return len(summary.rejected), bool(summary.unparsable), *_FACTS(summary)


def places(local: Iterable[int]) -> tuple[int, ...]:
    """Sequence hashes of a sequence of local hashes."""
    return unpacked(sequence_hashes(packed(local)))


def chained(parent: int, local: int) -> int:
    """Sequence hash of a block below the sequence hash ``parent``."""
    return xxh3_64_intdigest(struct.pack("<2Q", parent, local), 1337)


def stored(engine: Sequence[int], local: Sequence[int], parent: int | None = None, tier: int = DEVICE) -> KvEvent:
    return KvEvent(tier=tier, stored=BlocksStored(parent_engine_hash=parent, engine_hashes=engine, local_hashes=local))


def removed(*engine: int, tier: int = DEVICE) -> KvEvent:
    return KvEvent(tier=tier, removed=BlocksRemoved(engine_hashes=engine))


def cleared(tier: int = 0) -> KvEvent:
    return KvEvent(tier=tier, cleared=BlocksCleared())


def batch(
    first_id: int,
    *events: KvEvent,
    rank: Rank = RANK,
    incarnation: int = 1,
    counting: int = COUNTED,
    next_event_id: int | None = None,
    digest: int | None = None,
) -> bytes:
    """An encoded KvEventBatch whose events are numbered from ``first_id``."""
    for event_id, event in enumerate(events, first_id):
        event.event_id = event_id
    return KvEventBatch(
        worker_id=rank[0],
        dp_rank=rank[1],
        incarnation=incarnation,
        events=events,
        block_size=16,
        next_event_id=first_id + len(events) if next_event_id is None else next_event_id,
        digest=digest,
        copy_counting=counting,
    ).SerializeToString()


def event_on_wire(event: KvEvent, more: bytes = b"") -> bytes:
    """One more event of a batch, as it is on the wire."""
    encoded = event.SerializeToString() + more
    assert len(encoded) < 128
    return b"\x22" + bytes([len(encoded)]) + encoded


def digest_of(*entries: tuple[int, int, int, int]) -> int:
    """Digest of (engine hash, sequence hash, tier, copies)."""
    return sum(xxh3_64_intdigest(struct.pack("<4Q", *entry), 1337) for entry in entries) % (1 << 64)


def matches(index: Any, local: Iterable[int]) -> dict[Rank, tuple[int, int, int, int]]:
    """Rank → leading blocks to device, host, disk and shared storage; checked against ``overlaps``."""
    prompt = packed(local)
    answer = FindMatchesResponse.FromString(index.find_matches(prompt))
    assert answer.prompt_blocks == len(prompt) // 8
    ranks = list(zip(answer.worker_ids, answer.dp_ranks, strict=True))
    assert ranks == [tuple(info[:2]) for info in index.ranks()]
    columns = (answer.device_blocks, answer.host_blocks, answer.disk_blocks, answer.shared_blocks)
    slots = index.slots()
    for tier, column in enumerate(columns, 1):
        by_slot = index.overlaps(prompt, tier)
        assert len(by_slot) == 4 * len(slots)
        overlaps = dict(zip(slots, struct.unpack(f"<{len(slots)}I", by_slot), strict=True))
        overlaps.pop(None, None)
        assert overlaps == dict(zip(ranks, column, strict=True))
    return dict(zip(ranks, zip(*columns, strict=True), strict=True))


def device_overlap(index: Any, *local: int, rank: Rank = RANK) -> int:
    return matches(index, local)[rank][0]


def dumped(index: Any, rank: Rank = RANK, chunk_blocks: int = 4096) -> list[RankState]:
    return [RankState.FromString(chunk) for chunk in index.dump_rank(rank, chunk_blocks)]


def entries(states: Iterable[RankState]) -> dict[int, tuple[int, int, int, dict[int, int]]]:
    """Engine hash → (local hash, sequence hash, depth, tier → copies)."""
    return {
        block.engine_hash: (
            block.local_hash,
            block.sequence_hash,
            block.depth,
            {one.tier: one.copies for one in block.copies},
        )
        for state in states
        for block in state.blocks
    }
