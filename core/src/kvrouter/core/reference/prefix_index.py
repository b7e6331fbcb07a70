"""The prefix index: blocks and cursor of every rank."""

from __future__ import annotations

import functools
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from kvrouter.core.interface import ApplySummary, IndexStats, Rank, RankInfo, RefusedBatch
from kvrouter.core.reference import rank_dump
from kvrouter.core.reference.event_batch import EventBatch
from kvrouter.core.reference.event_rules import LAST_EVENT_ID, MAX_DEPTH, fault, tier_of
from kvrouter.core.reference.hashing import sequence_hashes, unpack
from kvrouter.core.reference.memory_budget import MemoryBudget
from kvrouter.core.reference.rank_blocks import PLACES, RankBlocks
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

_MAX_REASONS = 16
_BYTES_PER_BLOCK = 600
"""Measured with tracemalloc over 100,000 distinct blocks in one tier."""
_BYTES_PER_RANK = 1024


@dataclass(slots=True)
class _Rank:
    incarnation: int
    next_event_id: int = 0
    missing: bool = False
    """Whether blocks may be missing for a reason other than a bound."""
    over_bound: bool = False
    counted: bool = True
    blocks: RankBlocks = field(default_factory=RankBlocks)

    @property
    def partial(self) -> bool:
        return self.missing or self.over_bound

    @property
    def memory_bytes(self) -> int:
        return _BYTES_PER_RANK + _BYTES_PER_BLOCK * len(self.blocks)


@dataclass(slots=True)
class _Counts:
    applied: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_parents: int = 0
    unknown_removals: int = 0
    rejected: list[str] = field(default_factory=list)
    evicted_blocks: int | None = None
    evicted_others: list[tuple[int, int, int]] = field(default_factory=list)


def _evict(state: _Rank) -> int:
    """Empties a rank. Returns the number of entries dropped."""
    dropped = state.blocks.entries
    state.blocks = RankBlocks()
    state.over_bound = True
    return dropped


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _locked(method: Callable[Concatenate[PrefixIndex, _P], _T]) -> Callable[Concatenate[PrefixIndex, _P], _T]:
    """Runs a method with the lock of the index."""

    @functools.wraps(method)
    def call(self: PrefixIndex, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._lock:
            return method(self, *args, **kwargs)

    return call


class PrefixIndex:
    """Implements ``kvrouter.core.interface.PrefixIndex``."""

    def __init__(self, max_blocks: int = 0, budget: MemoryBudget | None = None, check_digests: bool = False) -> None:
        if max_blocks < 0:
            raise ValueError(f"expected a bound of 0 (none) or more, received {max_blocks}")
        self._max_blocks = max_blocks
        self._budget = MemoryBudget() if budget is None else budget
        self._budget.add(self)
        self.charged_bytes = 0
        """Memory of all ranks as of the last change, in bytes."""
        self._check_digests = check_digests
        self._ranks: dict[Rank, _Rank] = {}
        self._slots: list[Rank | None] = []
        self._lock = RLock()

    def apply_ns(self, batch: EventBatch) -> int | None:  # noqa: ARG002 - no change is quick in Python
        """Returns None: a change may take long."""
        return None

    @_locked
    def apply(self, batch: EventBatch | bytes) -> ApplySummary:
        """Applies a KvEventBatch."""
        try:
            message = (batch if isinstance(batch, EventBatch) else EventBatch(batch)).message
        except RefusedBatch as error:
            return ApplySummary(0, 0, unparsable=str(error))
        rank = (message.worker_id, message.dp_rank)
        state = self._ranks.get(rank)
        if state is not None and message.incarnation < state.incarnation:
            return ApplySummary(
                *rank,
                fenced=len(message.events) or 1,
                next_event_id=state.next_event_id,
                incarnation=state.incarnation,
            )
        new_incarnation = state is not None and message.incarnation > state.incarnation
        if state is None or new_incarnation:
            state = self._replace(rank, _Rank(message.incarnation))
        state.counted = message.copy_counting != CopyCounting.COPY_COUNTING_SET
        counts = _Counts()
        duplicates = 0
        gap = None
        for event in message.events:
            if event.event_id < state.next_event_id:
                duplicates += 1
            elif event.event_id > state.next_event_id:
                gap = (state.next_event_id, event.event_id)
                break
            else:
                self._apply_event(state, event, counts)
        if gap is None and message.next_event_id > state.next_event_id:
            gap = (state.next_event_id, message.next_event_id)
        self._charge()
        return ApplySummary(
            *rank,
            applied=counts.applied,
            stored_blocks=counts.stored_blocks,
            removed_blocks=counts.removed_blocks,
            duplicates=duplicates,
            gap=gap,
            unknown_parents=counts.unknown_parents,
            unknown_removals=counts.unknown_removals,
            rejected=tuple(counts.rejected),
            next_event_id=state.next_event_id,
            incarnation=state.incarnation,
            new_incarnation=new_incarnation,
            digest_differs=gap is None and self._digest_differs(state, message),
            evicted_blocks=counts.evicted_blocks,
            evicted_others=tuple(counts.evicted_others),
        )

    @_locked
    def find_matches(self, local_hashes: bytes) -> bytes:
        """Returns the encoded FindMatchesResponse for a prompt."""
        places = unpack(sequence_hashes(local_hashes))
        answer = FindMatchesResponse(prompt_blocks=len(places), pooled_blocks=self.pooled(local_hashes))
        for (worker_id, dp_rank), state in sorted(self._ranks.items()):
            device, host, disk, shared = state.blocks.overlaps(places)
            answer.worker_ids.append(worker_id)
            answer.dp_ranks.append(dp_rank)
            answer.device_blocks.append(device)
            answer.host_blocks.append(host)
            answer.disk_blocks.append(disk)
            answer.shared_blocks.append(shared)
            answer.incarnations.append(state.incarnation)
            answer.next_event_ids.append(state.next_event_id)
            answer.partial.append(state.partial)
        return answer.SerializeToString()

    def try_find_matches(self, local_hashes: bytes) -> bytes | None:
        """Returns the result of ``find_matches``, or None if another thread uses the index."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self.find_matches(local_hashes)
        finally:
            self._lock.release()

    @_locked
    def overlaps(self, local_hashes: bytes, tier: int = 1) -> bytes:
        """Returns the overlap to ``tier`` of each slot, as packed little-endian u32."""
        if tier not in PLACES:
            raise ValueError(f"expected a tier from {PLACES[0]} to {PLACES[-1]}, received {tier}")
        places = unpack(sequence_hashes(local_hashes))
        by_slot = [self._ranks[rank].blocks.overlaps(places)[tier - 1] if rank else 0 for rank in self._slots]
        return struct.pack(f"<{len(by_slot)}I", *by_slot)

    @_locked
    def pooled(self, local_hashes: bytes) -> int:
        """Returns the leading blocks in shared storage, whichever ranks stored them."""
        is_pooled = (
            any(state.blocks.is_in(Tier.TIER_SHARED, place) for state in self._ranks.values())
            for place in unpack(sequence_hashes(local_hashes))
        )
        return sum(1 for _ in takewhile(bool, is_pooled))

    @_locked
    def slots(self) -> list[Rank | None]:
        """Returns the rank of each slot."""
        return list(self._slots)

    @_locked
    def cursor(self, rank: Rank) -> tuple[int, int] | None:
        """Returns (incarnation, next_event_id) of a rank."""
        state = self._ranks.get(rank)
        return (state.incarnation, state.next_event_id) if state else None

    @_locked
    def digest(self, rank: Rank) -> int | None:
        """Returns the digest of a rank's entries."""
        state = self._ranks.get(rank)
        return state.blocks.digest() if state else None

    @_locked
    def is_evicted(self, rank: Rank) -> bool:
        """Returns whether a rank was emptied because the index exceeded a bound."""
        state = self._ranks.get(rank)
        return state is not None and state.over_bound

    @_locked
    def reset_rank(self, rank: Rank, incarnation: int, next_event_id: int, *, partial: bool = True) -> int:
        """Replaces a rank by an empty one."""
        if not (0 <= incarnation <= LAST_EVENT_ID and 0 <= next_event_id <= LAST_EVENT_ID):
            raise OverflowError(f"expected a cursor of two u64, received {(incarnation, next_event_id)}")
        before = self._ranks.get(rank)
        self._replace(rank, _Rank(incarnation, next_event_id, missing=partial))
        self._charge()
        return before.blocks.entries if before else 0

    @_locked
    def remove_rank(self, rank: Rank) -> int:
        """Removes a rank and its cursor."""
        state = self._ranks.pop(rank, None)
        if state is None:
            return 0
        self._slots[self._slots.index(rank)] = None
        self._charge()
        return state.blocks.entries

    @_locked
    def dump_rank(self, rank: Rank, chunk_blocks: int = 4096) -> Iterator[bytes]:
        """Returns encoded RankState chunks of one rank, as of the time of the call."""
        if chunk_blocks < 1:
            raise ValueError(f"expected chunks of 1 or more blocks, received {chunk_blocks}")
        state = self._ranks.get(rank)
        if state is None:
            return iter(())
        dump = rank_dump.RankDump(
            rank, state.incarnation, state.next_event_id, state.counted, state.partial, state.blocks.items()
        )
        return rank_dump.encode(dump, chunk_blocks)

    @_locked
    def load_rank(self, chunks: Iterable[bytes]) -> int:
        """Replaces a rank by a dump."""
        dump = rank_dump.decode(chunks)
        state = _Rank(dump.incarnation, dump.next_event_id, dump.partial, counted=dump.counted)
        state.blocks = rank_dump.restore(dump)
        self._replace(dump.rank, state)
        self._make_room(state, _Counts())
        self._charge()
        return state.blocks.entries

    @_locked
    def ranks(self) -> list[RankInfo]:
        """Returns all ranks, in order of (worker_id, dp_rank)."""
        return [
            RankInfo(
                *rank,
                incarnation=state.incarnation,
                next_event_id=state.next_event_id,
                blocks=state.blocks.entries,
                memory_bytes=state.memory_bytes,
                partial=state.partial,
                evicted=state.over_bound,
            )
            for rank, state in sorted(self._ranks.items())
        ]

    @_locked
    def stats(self) -> IndexStats:
        """Returns the size of the index."""
        states = self._ranks.values()
        return IndexStats(
            ranks=len(states),
            blocks=sum(state.blocks.entries for state in states),
            distinct_blocks=len({place for state in states for place in state.blocks.places()}),
            memory_bytes=sum(state.memory_bytes for state in states),
        )

    def _replace(self, rank: Rank, state: _Rank) -> _Rank:
        if rank not in self._ranks:
            if None in self._slots:
                self._slots[self._slots.index(None)] = rank
            else:
                self._slots.append(rank)
        self._ranks[rank] = state
        return state

    def _apply_event(self, state: _Rank, event: KvEvent, counts: _Counts) -> None:
        """Applies the event at the cursor."""
        reason = fault(event)
        if reason:
            self._reject(state, event, reason, counts)
        elif event.WhichOneof("change") == "cleared":
            counts.applied += 1
            state.blocks.clear(event.tier)
            if event.tier == Tier.TIER_UNSPECIFIED:
                state.missing = state.over_bound = False
        elif state.over_bound:
            counts.applied += 1
        elif event.WhichOneof("change") == "removed":
            counts.applied += 1
            for engine_hash in event.removed.engine_hashes:
                removed = state.blocks.remove(engine_hash, tier_of(event), state.counted)
                counts.removed_blocks += removed
                counts.unknown_removals += not removed
        else:
            self._store(state, event, counts)
        state.next_event_id = min(state.next_event_id + 1, LAST_EVENT_ID)

    def _store(self, state: _Rank, event: KvEvent, counts: _Counts) -> None:
        stored = event.stored
        parent = None
        if "parent_engine_hash" in stored:
            parent = state.blocks.get(stored.parent_engine_hash)
            if parent is None:
                counts.unknown_parents += 1
                state.missing = True
                state.blocks.release(stored.engine_hashes)
                return
            if parent.depth + len(stored.engine_hashes) > MAX_DEPTH:
                self._reject(state, event, "its chain is deeper than 2^32 blocks", counts)
                return
        state.blocks.store(parent, stored.engine_hashes, stored.local_hashes, tier_of(event), state.counted)
        counts.applied += 1
        self._make_room(state, counts)
        if counts.evicted_blocks is None:
            counts.stored_blocks += len(stored.engine_hashes)

    def _reject(self, state: _Rank, event: KvEvent, reason: str, counts: _Counts) -> None:
        state.missing = True
        if len(counts.rejected) < _MAX_REASONS:
            counts.rejected.append(f"event {event.event_id}: {reason}")

    def _make_room(self, grown: _Rank, counts: _Counts) -> None:
        """Evicts the largest rank of the worker with the most blocks, and if necessary the grown one."""
        if not self._exceeds_bounds():
            return
        largest = self._largest_rank(grown)
        if self._ranks[largest] is not grown:
            counts.evicted_others.append((*largest, _evict(self._ranks[largest])))
            if not self._exceeds_bounds():
                return
        counts.evicted_blocks = _evict(grown)

    def _largest_rank(self, grown: _Rank) -> Rank:
        """Returns the largest rank of the worker with the most blocks. Among equals, ``grown`` and its worker."""
        workers: Counter[int] = Counter()
        for rank, state in self._ranks.items():
            workers[rank[0]] += state.blocks.entries
        own = next(rank for rank, state in self._ranks.items() if state is grown)
        most = max(workers.values())
        worker = own[0] if workers[own[0]] == most else min(each for each in workers if workers[each] == most)
        ranks = sorted(rank for rank in self._ranks if rank[0] == worker)
        entries = max(self._ranks[rank].blocks.entries for rank in ranks)
        if own in ranks and grown.blocks.entries == entries:
            return own
        return next(rank for rank in ranks if self._ranks[rank].blocks.entries == entries)

    def _exceeds_bounds(self) -> bool:
        blocks = sum(one.blocks.entries for one in self._ranks.values())
        self._charge()
        max_bytes = self._budget.max_bytes
        return bool(self._max_blocks and blocks > self._max_blocks) or bool(
            max_bytes and self._budget.used_bytes > max_bytes
        )

    def _charge(self) -> None:
        self.charged_bytes = sum(one.memory_bytes for one in self._ranks.values())

    def _digest_differs(self, state: _Rank, message: KvEventBatch) -> bool:
        if "digest" not in message or message.next_event_id != state.next_event_id or state.partial:
            return False
        return (not message.events or self._check_digests) and message.digest != state.blocks.digest()
