"""Random histories of an index: what publishers send, what the transport does to it, and what repairs it.

The universe is small, so that engine hashes move, prefixes are shared, parents are missing and copies add up. Use it as
``@given(histories())`` and feed each operation to the implementations with ``perform``; ``view`` shows all that can be
seen of an index, in a form that is equal where indexes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from kvrouter.core import InvalidDump
from kvrouter.core.interface import Rank
from kvrouter.v1.common_pb2 import RankState
from kvrouter.v1.events_pb2 import KvEvent

from ..batches import COUNTED, SET, batch, chained, cleared, dumped, entries, matches, removed, said, stored

RANKS: list[Rank] = [(1, 0), (1, 1), (2, 0)]
ENGINE_HASHES = [*range(1, 11), (1 << 64) - 1]
LOCAL_HASHES = [1, 2, 3, (1 << 64) - 1]
PROMPTS = [[one, two, three, 1] for one in LOCAL_HASHES for two in (1, 2) for three in (1, 2)]

_LAST_ID = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Apply:
    """A batch arrives, or what should be one."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Reset:
    """A rank is emptied and gets a cursor."""

    rank: Rank
    incarnation: int
    next_event_id: int
    partial: bool


@dataclass(frozen=True, slots=True)
class Remove:
    """A rank is forgotten."""

    rank: Rank


@dataclass(frozen=True, slots=True)
class Reload:
    """A rank is dumped and loaded again, with one byte of the dump changed if ``spoil`` says where."""

    rank: Rank
    chunk_blocks: int
    spoil: tuple[int, int] | None
    """(position in the dump, wrapping around; what to combine that byte with by exclusive or)"""


Operation = Apply | Reset | Remove | Reload


@dataclass(slots=True)
class _Publisher:
    """What a rank's publisher knows."""

    incarnation: int = 1
    next_event_id: int = 0
    counting: int = COUNTED


def _chain(blocks: list[tuple[int, int]], parent: int | None, tier: int) -> KvEvent:
    return stored([engine for engine, _ in blocks], [local for _, local in blocks], parent, tier)


def _removal(engine_hashes: list[int], tier: int) -> KvEvent:
    return removed(*engine_hashes, tier=tier)


def _copy(event: KvEvent) -> KvEvent:
    """One that may be numbered."""
    return KvEvent.FromString(event.SerializeToString())


_tiers = st.sampled_from([0, 1, 1, 1, 1, 2, 2, 3, 4, 5, 5])
_engine_hashes = st.sampled_from(ENGINE_HASHES)
_chains = st.lists(
    st.tuples(_engine_hashes, st.sampled_from(LOCAL_HASHES)), min_size=1, max_size=5, unique_by=lambda block: block[0]
)
_parents = st.sampled_from([None] * 4 + ENGINE_HASHES)
_odd = st.sampled_from(
    [
        KvEvent(),
        removed(),
        cleared(6),
        stored([], [], parent=1),
        stored([3], [3], tier=7),
        stored([3], [3], tier=-1),
        stored([3, 4], [1]),
        stored([3, 4, 3], [1, 1, 1]),
        stored([3], [1], parent=3),
    ]
)
_roots_and_children = st.builds(_chain, _chains, _parents, _tiers)
_children = st.builds(_chain, _chains, _engine_hashes, _tiers)
_removals = st.builds(_removal, st.lists(_engine_hashes, min_size=1, max_size=4), _tiers)
_rarer = st.one_of(st.builds(cleared, st.integers(0, 5)), _odd.map(_copy))
_events = st.lists(
    st.one_of([_roots_and_children] * 3 + [_children] * 2 + [_removals] * 2 + [_rarer]),
    max_size=5,
)
_kinds = st.sampled_from(
    ["send"] * 24
    + ["lose", "lose and repair", "again", "new life", "old life", "recount", "spoil", "noise"]
    + ["reset", "remove", "reload", "reload", "reload spoilt"]
)
_ranks = st.sampled_from(RANKS)
_digests = st.sampled_from([None, None, 0, 5])
_lies = st.sampled_from([0] * 20 + [-1, 1, 1 << 62])


@st.composite
def histories(draw: st.DrawFn, max_operations: int = 25) -> list[Operation]:
    """Operations as an index may meet them, hostile ones included."""
    publishers = {rank: _Publisher() for rank in RANKS}
    sent: list[bytes] = []
    history: list[Operation] = []
    for _ in range(draw(st.integers(1, max_operations))):
        rank = draw(_ranks)
        publisher = publishers[rank]
        kind = draw(_kinds)
        if kind in ("send", "lose", "lose and repair", "old life", "spoil"):
            events = draw(_events)[: _LAST_ID + 1 - publisher.next_event_id]
            first_id, publisher.next_event_id = (
                publisher.next_event_id,
                min(_LAST_ID, publisher.next_event_id + len(events)),
            )
            incarnation = publisher.incarnation - (kind == "old life")
            data = batch(
                first_id,
                *events,
                rank=rank,
                incarnation=incarnation,
                counting=publisher.counting,
                next_event_id=min(_LAST_ID, max(0, publisher.next_event_id + draw(_lies))),
                digest=draw(_digests),
            )
            if kind == "spoil" and data:
                data = _spoilt(data, draw(st.integers(0, len(data) - 1)), draw(st.integers(1, 255)))
            if kind in ("lose", "lose and repair"):
                if kind == "lose and repair":
                    history.append(Reset(rank, incarnation, publisher.next_event_id, draw(st.booleans())))
                continue
            sent.append(data)
            history.append(Apply(data))
        elif kind == "again" and sent:
            history.append(Apply(draw(st.sampled_from(sent))))
        elif kind == "new life":
            publisher.incarnation += draw(st.integers(1, 2))
            publisher.next_event_id = 0
        elif kind == "recount":
            publisher.counting = draw(st.sampled_from([COUNTED, SET, 0, 9]))
        elif kind == "noise":
            history.append(Apply(draw(st.binary(max_size=40))))
        elif kind == "reset":
            next_event_id = draw(st.sampled_from([publisher.next_event_id, 0, _LAST_ID - 1, _LAST_ID]))
            publisher.next_event_id = next_event_id if next_event_id < _LAST_ID else 0
            history.append(Reset(rank, publisher.incarnation, next_event_id, draw(st.booleans())))
        elif kind == "remove":
            history.append(Remove(rank))
        elif kind.startswith("reload"):
            spoil = (draw(st.integers(0, 2000)), draw(st.integers(1, 255))) if kind == "reload spoilt" else None
            history.append(Reload(rank, draw(st.integers(1, 6)), spoil))
    return history


def perform(index: Any, operation: Operation) -> object:
    """Does it, and returns what the index said, in a form that is equal where the answers mean the same."""
    if isinstance(operation, Apply):
        return said(index.apply(operation.data))
    if isinstance(operation, Reset):
        return index.reset_rank(
            operation.rank, operation.incarnation, operation.next_event_id, partial=operation.partial
        )
    if isinstance(operation, Remove):
        return index.remove_rank(operation.rank)
    chunks = list(index.dump_rank(operation.rank, operation.chunk_blocks))
    if operation.spoil is not None:
        chunks = _spoilt_dump(dumped(index, operation.rank), *operation.spoil)
    try:
        return index.load_rank(chunks)
    except InvalidDump:
        return "invalid"


def view(index: Any) -> object:
    """All that can be seen of an index, apart from memory and from figures that may differ."""
    ranks = [(*info[:5], info.partial) for info in index.ranks()]
    return (
        ranks,
        tuple(index.stats()[:2]),
        {
            info[:2]: (index.cursor(info[:2]), index.digest(info[:2]), entries(dumped(index, info[:2])))
            for info in ranks
        },
        [matches(index, prompt) for prompt in PROMPTS],
    )


def _spoilt_dump(states: list[RankState], at: int, change: int) -> list[bytes]:
    """A dump as one chunk with a byte changed; as it is where a block's parent is not held, for such a block cannot be
    checked. Blocks are in one order, whatever the implementation's, so that the same byte is hit."""
    if not states:
        return []
    records = sorted(
        (block for state in states for block in state.blocks), key=lambda one: (one.depth, one.engine_hash)
    )
    for record in records:
        parents = [
            one.engine_hash
            for one in records
            if one.depth == record.depth - 1 and chained(one.sequence_hash, record.local_hash) == record.sequence_hash
        ]
        record.ClearField("parent_engine_hash")
        if parents:
            record.parent_engine_hash = parents[0]
        record.copies.sort(key=lambda one: one.tier)
    whole = states[-1]
    encoded = RankState(
        rank=whole.rank,
        cursor=whole.cursor,
        blocks=records,
        last=True,
        digest=whole.digest,
        copy_counting=whole.copy_counting,
        partial=whole.partial,
    ).SerializeToString(deterministic=True)
    if any(record.depth and not record.HasField("parent_engine_hash") for record in records):
        return [encoded]
    return [_spoilt(encoded, at % len(encoded), change)]


def _spoilt(data: bytes, at: int, change: int) -> bytes:
    return data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
