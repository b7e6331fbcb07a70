"""Batches as a publisher would send them, made by hand."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

from kvrouter.core import local_hashes
from kvrouter.v1.common_pb2 import Tier
from kvrouter.v1.events_pb2 import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext

BLOCK_SIZE = 4


def tokens(blocks: int, seed: int = 0) -> list[int]:
    """Token ids of that many blocks."""
    return [seed * 1_000_000 + number for number in range(blocks * BLOCK_SIZE)]


def hashes(token_ids: list[int]) -> list[int]:
    """Local hashes of a prompt."""
    packed = local_hashes(token_ids, BLOCK_SIZE)
    return list(struct.unpack(f"<{len(packed) // 8}Q", packed))


@dataclass
class RankSource:
    """One rank's events, numbered."""

    component: ComponentName
    worker_id: int
    dp_rank: int = 0
    incarnation: int = 1
    next_event_id: int = 0
    block_size: int = BLOCK_SIZE
    events: list[KvEvent] = field(default_factory=list)

    @property
    def subject(self) -> str:
        return self.component.events_subject(self.worker_id, self.dp_rank)

    def stored(self, token_ids: list[int], engine_base: int, parent: int | None = None) -> RankSource:
        """A chain; the engine hash of its n-th block is ``engine_base + n``."""
        local = hashes(token_ids)
        chain = BlocksStored(engine_hashes=[engine_base + n for n in range(len(local))], local_hashes=local)
        if parent is not None:
            chain.parent_engine_hash = parent
        return self._add(KvEvent(stored=chain))

    def removed(self, *engine_hashes: int) -> RankSource:
        return self._add(KvEvent(removed=BlocksRemoved(engine_hashes=engine_hashes)))

    def cleared(self) -> RankSource:
        return self._add(KvEvent(cleared=BlocksCleared()))

    def lose(self) -> RankSource:
        """The events gathered so far do not reach the stream."""
        self.events.clear()
        return self

    def batch(self) -> bytes:
        """What was gathered, or a heartbeat."""
        batch = KvEventBatch(
            worker_id=self.worker_id,
            dp_rank=self.dp_rank,
            incarnation=self.incarnation,
            block_size=self.block_size,
            events=self.events,
            next_event_id=self.next_event_id,
            published_unix_ns=time.time_ns(),
        )
        self.events.clear()
        return batch.SerializeToString()

    async def publish(self, js: JetStreamContext) -> int:
        """Publishes what was gathered; returns its sequence in the stream."""
        return (await js.publish(self.subject, self.batch())).seq

    def _add(self, event: KvEvent) -> RankSource:
        event.event_id = self.next_event_id
        if event.WhichOneof("change") != "cleared":
            event.tier = Tier.TIER_DEVICE
        self.next_event_id += 1
        self.events.append(event)
        return self
