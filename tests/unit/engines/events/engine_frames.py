"""Builds the payloads that engines publish, and a rank to which they are applied."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.core import PrefixIndex, Scope, local_hashes
from kvrouter.engines.events.translation import EventTranslator, TranslationOptions
from kvrouter.engines.events.vllm_sglang_events import Dialect, decode_batch
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.v1.common_pb2 import CopyCounting, Cursor, Tier

BLOCK = 4
RANK = (3, 0)


def payload(*events: Any, timestamp: Any = 1.5, rank: Any = 0) -> bytes:
    return msgspec.msgpack.encode([timestamp, list(events), rank])


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def stored(hashes: list[Any], first: int, parent: Any = None, **fields: Any) -> dict[str, Any]:
    """Returns a store of blocks with consecutive tokens from ``first`` on."""
    known = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens(first, len(hashes)),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }
    return known | fields


def removed(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"} | fields


CLEARED = {"type": "AllBlocksCleared"}


class Engine:
    """The publisher of a rank behind a translator, and an index of what it published."""

    def __init__(
        self,
        dialect: Dialect = "vllm",
        copy_counting: CopyCounting = CopyCounting.COPY_COUNTING_COUNTED,
        block_size: int = BLOCK,
        **options: Any,
    ) -> None:
        self.block_size = block_size
        self.rank = RankPublisher(
            subject="s",
            worker_id=RANK[0],
            dp_rank=RANK[1],
            incarnation=9,
            block_size=block_size,
            copy_counting=copy_counting,
        )
        self.translator = EventTranslator(self.rank, TranslationOptions(block_size, **options))
        self._dialect = dialect
        self._position = 0

    def publish(self, *events: Any) -> None:
        self.receive(payload(*events))

    def receive(self, encoded: bytes) -> None:
        self.translator.apply(decode_batch(encoded, self._dialect), self._position)
        self._position += 1

    @property
    def left_out(self) -> dict[str, int]:
        return dict(self.translator.left_out)

    def index(self) -> PrefixIndex:
        """Returns an index that applied all events. It equals the publisher's state."""
        index = PrefixIndex()
        for batch in self.rank.events(Cursor(incarnation=9)):
            summary = index.apply(batch.SerializeToString())
            assert not summary.rejected
            assert not summary.unknown_parents
        assert (index.digest(RANK) or 0) == self.rank.stats().digest
        return index

    def overlap(
        self,
        token_ids: list[int],
        *,
        scope: Scope = Scope(),  # noqa: B008 - immutable
        multimodal: list[tuple[int, int]] | None = None,
        tier: Tier = Tier.TIER_DEVICE,
    ) -> int:
        """Returns the number of leading blocks of a prompt that the rank holds."""
        hashed = local_hashes(token_ids, self.block_size, scope, multimodal or [])
        return int.from_bytes(self.index().overlaps(hashed, tier)[:4], "little")
