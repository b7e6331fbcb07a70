"""What an Indexer's answer means, however its ranks are ordered, and what becomes of a broken one."""

from __future__ import annotations

import pytest
from kvrouter.scheduler.overlap.indexer_query import read_answer
from kvrouter.scheduler.workers.candidates import WorkerSet, candidates_of
from kvrouter.v1.errors import Internal
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse

from ..harness import worker


def answer(*ranks: tuple[int, int], incarnation: int = 1) -> bytes:
    """An answer with ranks (worker, blocks)."""
    return FindMatchesResponse(
        worker_ids=[worker_id for worker_id, _ in ranks],
        dp_ranks=[0] * len(ranks),
        device_blocks=[blocks for _, blocks in ranks],
        incarnations=[incarnation] * len(ranks),
        next_event_ids=[100 + worker_id for worker_id, _ in ranks],
    ).SerializeToString()


def workers(*ids: int, incarnation: int = 1) -> WorkerSet:
    return WorkerSet(candidates_of(worker(number, incarnation=incarnation) for number in ids))


@pytest.mark.parametrize(
    ("ranks", "blocks"),
    [
        ([(1, 4), (2, 5), (1 << 63, 6)], [4, 5, 6]),
        ([(1 << 63, 6), (1, 4), (2, 5)], [4, 5, 6]),
        ([(1, 4), (3, 9), (1 << 63, 6)], [4, 0, 6]),
        ([(1, 4), (2, 5), (1 << 63, 6), ((1 << 63) + 1, 7)], [4, 5, 6]),
        ([(2, 99)], [0, 8, 0]),
        ([], [0, 0, 0]),
    ],
    ids=["in order", "another order", "one unknown, one missing", "one more", "beyond the prompt", "none"],
)
def test_overlaps_belong_to_the_ranks_that_the_answer_names(ranks: list[tuple[int, int]], blocks: list[int]) -> None:
    registered = workers(1, 2, 1 << 63)
    for _ in range(2):  # the second time the list of ranks is known
        overlaps = read_answer(answer(*ranks), most_blocks=8)
        assert overlaps.on(registered).tolist() == blocks
    for worker_id, _ in ranks:
        response = SelectWorkerResponse()
        overlaps.write_cursor((worker_id, 0), response)
        assert (response.cursor.incarnation, response.cursor.next_event_id) == (1, 100 + worker_id)
    response = SelectWorkerResponse()
    overlaps.write_cursor((77, 0), response)
    assert not response.HasField("cursor")


def test_blocks_of_another_incarnation_count_as_none() -> None:
    for incarnation, blocks in ((1, [4]), (2, [0]), (1, [4])):
        overlaps = read_answer(answer((1, 4), incarnation=incarnation), most_blocks=8)
        assert overlaps.on(workers(1)).tolist() == blocks


@pytest.mark.parametrize("name", ["worker_ids", "dp_ranks", "device_blocks", "incarnations", "next_event_ids"])
def test_an_answer_whose_columns_differ_in_length_is_refused(name: str) -> None:
    broken = FindMatchesResponse.FromString(answer((1, 4), (2, 5)))
    del getattr(broken, name)[1:]
    with pytest.raises(Internal):
        read_answer(broken.SerializeToString(), most_blocks=8)


@pytest.mark.parametrize("lengths", [(1, 2, 2), (2, 3, 2), (2, 2, 1), (1, 1, 1), (3, 3, 3)])
def test_lower_tiers_of_another_length_are_refused(lengths: tuple[int, int, int]) -> None:
    broken = FindMatchesResponse.FromString(answer((1, 4), (2, 5)))
    for column, length in zip((broken.host_blocks, broken.disk_blocks, broken.shared_blocks), lengths, strict=True):
        column[:] = [9] * length
    with pytest.raises(Internal):
        read_answer(broken.SerializeToString(), most_blocks=8)


def test_bytes_that_are_no_answer_are_refused() -> None:
    with pytest.raises(Internal):
        read_answer(b"\xff\xff\xff", most_blocks=8)
