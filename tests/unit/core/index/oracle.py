"""What an index must hold, from physical copies: simpler than any index, and without hashes of places.

The place of a block is the tuple of local hashes that leads to it. Copies are a list with one item for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError
from kvrouter.core.interface import Rank
from kvrouter.v1.events_pb2 import KvEvent, KvEventBatch

from ..batches import CHECKPOINT, LAST_ID, SET, digest_of, places

Place = tuple[int, ...]


@dataclass(slots=True)
class Copy:
    """One physical copy of a block."""

    engine_hash: int
    place: Place
    tier: int


@dataclass(slots=True)
class OracleRank:
    """A rank."""

    incarnation: int
    next_event_id: int = 0
    partial: bool = False
    copies: list[Copy] = field(default_factory=list)

    @property
    def entries(self) -> int:
        return len({(copy.engine_hash, copy.tier) for copy in self.copies})

    def digest(self) -> int:
        counts = Counter((copy.engine_hash, copy.place, copy.tier) for copy in self.copies)
        return digest_of(*((engine, places(place)[-1], tier, n) for (engine, place, tier), n in counts.items()))

    def overlaps(self, prompt: Iterable[int]) -> tuple[int, int, int, int]:
        """Overlap to each tier, by brute force."""
        prompt = tuple(prompt)
        checkpoints = {copy.place for copy in self.copies if copy.tier == CHECKPOINT}

        def overlap(tier: int) -> int:
            resident = {copy.place for copy in self.copies if copy.tier <= tier}
            ends = [n for n in range(len(prompt) + 1) if not n or not checkpoints or prompt[:n] in checkpoints]
            return max(n for n in ends if all(prompt[: i + 1] in resident for i in range(n)))

        return overlap(1), overlap(2), overlap(3), overlap(4)

    def apply(self, event: KvEvent, counted: bool) -> None:
        """Applies an event that is the next."""
        self.next_event_id = min(self.next_event_id + 1, LAST_ID)
        if not all(self._sound(event)):
            self.partial = True
        elif event.WhichOneof("change") == "cleared":
            self.copies = [copy for copy in self.copies if event.tier not in (0, copy.tier)]
            self.partial = self.partial and event.tier != 0
        elif event.WhichOneof("change") == "removed":
            for engine_hash in event.removed.engine_hashes:
                there = [
                    copy for copy in self.copies if (copy.engine_hash, copy.tier) == (engine_hash, event.tier or 1)
                ]
                for copy in there[:1] if counted else there:
                    self.copies.remove(copy)
        else:
            self._store(event, counted)

    def _store(self, event: KvEvent, counted: bool) -> None:
        place: Place = ()
        if event.stored.HasField("parent_engine_hash"):
            parents = {copy.place for copy in self.copies if copy.engine_hash == event.stored.parent_engine_hash}
            if not parents:
                # They moved to where nobody knows.
                self.copies = [copy for copy in self.copies if copy.engine_hash not in event.stored.engine_hashes]
                self.partial = True
                return
            (place,) = parents
        for engine_hash, local in zip(event.stored.engine_hashes, event.stored.local_hashes, strict=True):
            place = (*place, local)
            copy = Copy(engine_hash, place, event.tier or 1)

            def stays(old: Copy, new: Copy = copy) -> bool:
                if old.engine_hash != new.engine_hash:
                    return True
                return old.place == new.place and (counted or old.tier != new.tier)

            self.copies = [*filter(stays, self.copies), copy]

    @staticmethod
    def _sound(event: KvEvent) -> Iterator[bool]:
        """What an event must fulfil."""
        yield event.event_id != LAST_ID
        yield event.tier in range(6)
        yield event.WhichOneof("change") is not None
        if event.WhichOneof("change") == "removed":
            yield len(event.removed.engine_hashes) > 0
        if event.WhichOneof("change") == "stored":
            stored = event.stored
            yield len(stored.engine_hashes) == len(stored.local_hashes) > 0
            named = [*stored.engine_hashes]
            if stored.HasField("parent_engine_hash"):
                named.append(stored.parent_engine_hash)
            yield len(set(named)) == len(named)


class Oracle:
    """Ranks."""

    def __init__(self) -> None:
        self.ranks: dict[Rank, OracleRank] = {}

    def apply(self, data: bytes) -> None:
        """Applies a batch."""
        try:
            batch = KvEventBatch.FromString(data)
        except DecodeError:
            return
        rank = self.ranks.get((batch.worker_id, batch.dp_rank))
        if rank is None or rank.incarnation < batch.incarnation:
            rank = self.ranks[batch.worker_id, batch.dp_rank] = OracleRank(batch.incarnation)
        if batch.incarnation < rank.incarnation:
            return
        for event in batch.events:
            if event.event_id > rank.next_event_id:
                return
            if event.event_id == rank.next_event_id:
                rank.apply(event, counted=batch.copy_counting != SET)
