"""What an engine can report of a rank, compared with an index that applied the resulting events."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from kvrouter.core import PrefixIndex, Scope, local_hashes, multimodal_hash
from kvrouter.publisher.errors import InvalidEvent, UnknownParent
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.snapshots.rank_file import Identity, RankFile, recover
from kvrouter.v1.common_pb2 import CopyCounting, Cursor, Tier
from kvrouter.v1.names import ComponentName

BLOCK = 4
RANK = (3, 1)
COUNTED, SET = CopyCounting.COPY_COUNTING_COUNTED, CopyCounting.COPY_COUNTING_SET
IDENTITY = Identity(ComponentName("n", "c"), *RANK, BLOCK, COUNTED, "engine")


def publisher(**options: Any) -> RankPublisher:
    return RankPublisher(subject="s", worker_id=RANK[0], dp_rank=RANK[1], incarnation=9, block_size=BLOCK, **options)


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def indexed(rank: RankPublisher) -> PrefixIndex:
    """Returns an index that applied all events so far, and holds what the rank's digest says."""
    index = PrefixIndex()
    for batch in rank.events(Cursor(incarnation=9)):
        summary = index.apply(batch.SerializeToString())
        assert not summary.rejected
        assert not summary.unknown_parents
    assert (index.digest(RANK) or 0) == rank.stats().digest
    return index


def overlap(rank: RankPublisher, hashed: bytes, tier: Tier = Tier.TIER_DEVICE) -> int:
    packed = indexed(rank).overlaps(hashed, tier)
    return int.from_bytes(packed[:4], "little")


def test_a_child_inherits_the_scope_of_its_parent() -> None:
    rank, scope = publisher(), Scope(lora_name="adapter", cache_salt="salt")
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[1], scope=scope)
    rank.stored(token_ids=tokens(4, 2), engine_hashes=[2, 3], parent=1)
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK, scope)) == 3
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK)) == 0


async def test_a_relay_that_resumes_still_inherits_scopes(tmp_path: Path) -> None:
    scope, file = Scope(cache_salt="salt"), RankFile(tmp_path / "rank.snapshot", IDENTITY)
    former = publisher(file=file)
    former.stored(token_ids=tokens(0, 1), engine_hashes=[1], scope=scope)
    former.events_lost()
    former.stored(token_ids=tokens(0, 1), engine_hashes=[1], scope=scope)
    former.stored(token_ids=tokens(50, 2), engine_hashes=[9], block_size=2 * BLOCK)
    await former.save()
    found = recover(file.path, IDENTITY)
    assert found.partial
    rank = publisher(file=replace(file, recovered=found))
    assert rank.stats().partial
    rank.stored(token_ids=tokens(4, 1), engine_hashes=[2], parent=1)
    rank.removed([9])
    assert rank.stats().blocks == 2
    index = PrefixIndex()
    index.load_rank(list(found.recorder.dump(True)))
    for hashed, known in ((local_hashes(tokens(0, 2), BLOCK, scope), 2), (local_hashes(tokens(50, 2), BLOCK), 0)):
        assert int.from_bytes(index.overlaps(hashed, Tier.TIER_DEVICE)[:4], "little") == known


def test_a_message_whose_body_raises_leaves_nothing_behind() -> None:
    rank = publisher()
    with rank.reporting(0):
        rank.stored(token_ids=tokens(0, 3), engine_hashes=[1, 2, 3])
        rank.removed([3])
    before = rank.stats()

    def report() -> None:
        with rank.reporting(1):
            rank.removed([1])
            rank.removed([77])
            rank.stored(token_ids=tokens(50, 1), engine_hashes=[2])
            rank.stored_in_tier([2], tier=Tier.TIER_HOST)
            rank.events_lost()
            rank.stored(token_ids=tokens(90, 1), engine_hashes=[9])
            rank.stored(token_ids=tokens(60, 1), engine_hashes=[8], parent=404)

    with pytest.raises(UnknownParent):
        report()
    assert rank.stats() == before
    assert rank.is_resident(1)
    with rank.reporting(1):
        rank.stored(token_ids=tokens(8, 1), engine_hashes=[4], parent=2)
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK)) == 3


def report_half(rank: RankPublisher) -> None:
    with rank.reporting(1):
        rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
        rank.stored(token_ids=tokens(60, 1), engine_hashes=[8], parent=404)


async def test_a_restarted_relay_repeats_a_message_whose_body_raised(tmp_path: Path) -> None:
    file = RankFile(tmp_path / "rank.snapshot", IDENTITY)
    rank = publisher(file=file)
    with rank.reporting(0):
        rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
    with pytest.raises(UnknownParent):
        report_half(rank)
    await rank.save()
    found = recover(file.path, IDENTITY)
    assert found.position == 0
    assert found.recorder.counts().device_copies == 1


def test_repeated_blocks_are_no_new_copies() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2])
    rank.stored(token_ids=tokens(0, 4), engine_hashes=[1, 2, 3, 4], new_copies=False)
    assert overlap(rank, local_hashes(tokens(0, 4), BLOCK)) == 4
    for engine_hash in (4, 3, 2, 1):
        rank.removed([engine_hash])
        assert overlap(rank, local_hashes(tokens(0, 4), BLOCK)) == engine_hash - 1
    assert rank.stats().blocks == 0


def test_a_hole_in_a_repeated_chain_is_filled() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 4), engine_hashes=[1, 2, 3, 4])
    rank.removed([2])
    rank.stored(token_ids=tokens(0, 4), engine_hashes=[1, 2, 3, 4], new_copies=False)
    assert overlap(rank, local_hashes(tokens(0, 4), BLOCK)) == 4


def test_a_known_block_is_stored_in_another_tier_without_its_tokens() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 3), engine_hashes=[1, 2, 3])
    assert rank.stored_in_tier([1, 2, 3, 77], tier=Tier.TIER_HOST) == 3
    assert rank.stats().unplaced_blocks == 1
    rank.removed([1, 2, 3])
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK)) == 0
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK), Tier.TIER_HOST) == 3


def test_a_known_block_whose_parent_is_gone_cannot_be_placed() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 3), engine_hashes=[1, 2, 3])
    rank.removed([2])
    assert rank.stored_in_tier([3], tier=Tier.TIER_HOST) == 0
    assert rank.stats().unplaced_blocks == 1
    indexed(rank)


def test_residence_can_be_asked() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[-1], tier=Tier.TIER_DISK)
    assert rank.is_resident((1 << 64) - 1, tier=Tier.TIER_DISK)
    assert not rank.is_resident(-1)


def test_lost_events_leave_the_rank_partial_until_it_is_cleared() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2])
    rank.events_lost()
    assert rank.stats().partial
    assert overlap(rank, local_hashes(tokens(0, 2), BLOCK)) == 0
    with pytest.raises(UnknownParent):
        rank.stored(token_ids=tokens(8, 1), engine_hashes=[3], parent=2)
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
    rank.cleared(tier=Tier.TIER_HOST)
    assert rank.stats().partial
    rank.cleared()
    assert not rank.stats().partial
    assert rank.stats().events_lost == 1


def test_lost_stores_cost_no_blocks() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2])
    for _ in range(2):
        rank.events_lost(removals=False)
    stats = rank.stats()
    assert (stats.partial, stats.events_lost, stats.blocks) == (True, 1, 2)


def test_one_rank_restarts_while_the_worker_continues() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2])
    rank.events_lost()
    rank.restarted()
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
    stats = rank.stats()
    assert (stats.restarts, stats.partial, stats.blocks) == (1, False, 1)
    assert overlap(rank, local_hashes(tokens(0, 2), BLOCK)) == 1


def test_a_larger_block_of_the_engine_is_divided() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
    rank.stored(token_ids=tokens(4, 6), engine_hashes=[10, 11], parent=1, block_size=3 * BLOCK, tier=Tier.TIER_HOST)
    rank.stored(token_ids=tokens(28, 1), engine_hashes=[12], parent=11, tier=Tier.TIER_HOST)
    rank.stored_in_tier([1], tier=Tier.TIER_HOST)
    whole = local_hashes(tokens(0, 8), BLOCK)
    assert overlap(rank, whole, Tier.TIER_HOST) == 8
    rank.removed([11], tier=Tier.TIER_HOST)
    assert overlap(rank, whole, Tier.TIER_HOST) == 4
    rank.removed([10, 12], tier=Tier.TIER_HOST)
    assert rank.stats().blocks == 1


@pytest.mark.parametrize("block_size", [BLOCK + 1, 2])
def test_a_block_that_is_no_multiple_is_refused(block_size: int) -> None:
    with pytest.raises(InvalidEvent, match="block_size"):
        publisher().stored(token_ids=tokens(0, 1), engine_hashes=[1], block_size=block_size)


def test_multimodal_ids_are_hashed_by_the_contracts_rule() -> None:
    rank = publisher()
    rank.stored(token_ids=tokens(0, 3), engine_hashes=[1, 2, 3], multimodal=[(0, "image"), (1, b"embedding"), (2, 7)])
    pairs = [(0, multimodal_hash("image")), (1, multimodal_hash(b"embedding")), (2, 7)]
    assert overlap(rank, local_hashes(tokens(0, 3), BLOCK, multimodal=pairs)) == 3


def test_hashes_come_in_all_forms() -> None:
    rank, digest = publisher(), bytes(range(32))
    rank.stored(token_ids=tokens(0, 3), engine_hashes=np.array([1, 2, -3], dtype=np.int64))  # type: ignore[arg-type]
    rank.stored(token_ids=np.arange(12, 16), engine_hashes=[digest], parent=np.uint64((1 << 64) - 3))  # type: ignore[arg-type]
    assert rank.is_resident(int.from_bytes(digest[-8:], "big"))
    rank.removed([digest])
    assert rank.stats().blocks == 3


@pytest.mark.parametrize(
    "report",
    [
        {"engine_hashes": [b"short"]},
        {"engine_hashes": ["text"]},
        {"engine_hashes": [None]},
        {"engine_hashes": [1.5]},
        {"engine_hashes": [1 << 64]},
        {"engine_hashes": None},
        {"engine_hashes": 5},
        {"engine_hashes": b"12345678"},
        {"engine_hashes": [1], "parent": "text"},
        {"engine_hashes": [1], "parent": b"1"},
        {"engine_hashes": [1], "token_ids": None},
        {"engine_hashes": [1], "token_ids": [1, 2, "3", 4]},
        {"engine_hashes": [1], "token_ids": [1, 2, 3, -4]},
        {"engine_hashes": [1], "token_ids": [1, 2, 3]},
        {"engine_hashes": [1], "multimodal": [(0, None)]},
        {"engine_hashes": [1], "multimodal": [(0, -1)]},
        {"engine_hashes": [1], "multimodal": [5]},
        {"engine_hashes": [1], "tier": 99},
    ],
    ids=str,
)
def test_a_malformed_report_is_an_invalid_event(report: dict[str, Any]) -> None:
    rank = publisher()
    with pytest.raises(InvalidEvent):
        rank.stored(**({"token_ids": tokens(0, 1)} | report))
    assert rank.stats().next_event_id == 0


@pytest.mark.parametrize("hashes", [None, ["text"], [b"short"], 5, [1 << 64]])
def test_a_malformed_removal_is_an_invalid_event(hashes: Any) -> None:
    with pytest.raises(InvalidEvent):
        publisher().removed(hashes)


def test_a_set_configuration_with_counted_reports_is_noticed() -> None:
    rank = publisher(copy_counting=SET)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
        for _ in range(2):
            rank.removed([1])
    assert rank.stats().copy_counting_doubts == 1
    assert [line["event"] for line in logs] == ["publish.copy_counting_doubted"]


def test_more_copies_than_the_device_has_blocks_are_noticed() -> None:
    rank = publisher(total_blocks=2)
    for number in itertools.count():
        rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
        assert rank.stats().copy_counting_doubts == max(0, number - 1)
        if number == 4:
            break
    rank.cleared()
    rank.stored(token_ids=tokens(0, 1), engine_hashes=[1])
    rank.stored(token_ids=tokens(0, 2), engine_hashes=[1, 2], tier=Tier.TIER_HOST)
    assert rank.stats().copy_counting_doubts == 3
