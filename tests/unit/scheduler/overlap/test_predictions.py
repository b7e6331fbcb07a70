"""The approximate mode: a rank is taken to hold what was booked on it, for a while."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvrouter.scheduler.overlap.predictions import PredictionLimits
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.errors import Internal

from ..harness import Parts, ResidentBlocks, constraints, overrides, routing, selecting, view, worker


def predicting(*, workers: int = 3, indexer: ResidentBlocks | None = None, **limits: float) -> Parts:
    views = view(*(worker(each + 1) for each in range(workers)))
    return Parts(views, predicts=PredictionLimits(**limits), indexer=indexer)  # type: ignore[arg-type]


async def test_a_prompt_follows_its_prefix_and_no_indexer_is_queried() -> None:
    indexer = ResidentBlocks()
    parts = predicting(indexer=indexer)
    first = await parts.select(selecting("a", routing(6)))
    assert (first.overlap_blocks, first.load_only) == (0, False)
    parts.booking_table.free(("a", 0, 1))
    second = await parts.select(selecting("b", routing(8)))
    assert (second.rank, second.overlap_blocks, second.load_only) == (first.rank, 6, False)
    assert not second.HasField("cursor"), "there are no events"
    assert indexer.queries == []
    other = await parts.select(selecting("c", routing(8, seed=1)))
    assert other.overlap_blocks == 0


async def test_a_selection_without_a_booking_predicts_nothing() -> None:
    parts = predicting(workers=1)
    await parts.select(selecting(None, routing(6)))
    assert (await parts.select(selecting("a", routing(6)))).overlap_blocks == 0


async def test_a_prediction_lapses_after_its_time() -> None:
    parts = predicting(workers=1, ttl_seconds=30.0)
    await parts.select(selecting("a", routing(6)))
    parts.now += 29
    assert (await parts.select(selecting("b", routing(4, tail=1)))).overlap_blocks == 4
    parts.now += 29
    assert (await parts.select(selecting("c", routing(6)))).overlap_blocks == 4, "only those used again are left"
    parts.now += 31
    assert (await parts.select(selecting("d", routing(6)))).overlap_blocks == 0


async def test_predictions_are_bounded() -> None:
    parts = predicting(workers=1, max_blocks=10, prune_ratio=0.5)
    for number in range(5):
        parts.now += 1
        await parts.select(selecting(f"r{number}", routing(4, seed=number)))
    parts.now += 1
    held = [
        (await parts.select(selecting(None, routing(4, seed=number, tail=1)))).overlap_blocks for number in range(5)
    ]
    assert held[0] == 0
    assert held[4] == 4
    assert sum(held) <= 10


async def test_blocks_of_a_long_prompt_are_recorded_apart_from_its_decision() -> None:
    parts, waiting = predicting(workers=1), list[Callable[[], None]]()
    predictions = parts.router.predictions
    assert predictions is not None
    predictions.later = waiting.append
    await parts.select(selecting("short", routing(6, seed=1)))
    assert len(predictions) == 6
    await parts.select(selecting("a", routing(5000)))
    assert len(predictions) == 6
    assert (await parts.select(selecting("b", routing(5000, tail=1)))).overlap_blocks == 5000, "recorded when needed"
    for record in waiting:
        record()
    assert (len(waiting), len(predictions)) == (2, 5006)


@pytest.mark.parametrize("booked_since", [False, True])
async def test_a_worker_that_restarts_holds_nothing_of_before(booked_since: bool) -> None:
    parts = predicting(workers=1)
    await parts.select(selecting("a", routing(6)))
    parts.registered.register(view(worker(1, incarnation=2)))
    if booked_since:
        await parts.select(selecting("b", routing(2)))
    answer = await parts.select(selecting("c", routing(6)))
    assert answer.overlap_blocks == (2 if booked_since else 0)


async def test_blocks_of_another_size_are_other_blocks() -> None:
    parts = predicting(workers=1)
    await parts.select(selecting("a", routing(6)))
    parts.registered.register(view(worker(1), block_size=32))
    assert (await parts.select(selecting("b", routing(6)))).overlap_blocks == 0


async def test_weight_0_predicts_but_does_not_use_it() -> None:
    parts = predicting(workers=1)
    parts.options = RoutingOptions()
    await parts.select(selecting("a", routing(6, overrides=overrides(overlap_score_weight=0.0))))
    unused = await parts.select(selecting("b", routing(6, overrides=overrides(overlap_score_weight=0.0))))
    assert unused.overlap_blocks == 0
    assert (await parts.select(selecting("c", routing(6, tail=1)))).overlap_blocks == 6


def mixed(indexer: ResidentBlocks, *silent: int, talking: tuple[int, ...] = ()) -> Parts:
    """A pool of workers without events, and of others with them."""
    workers = [worker(each) for each in silent]
    for each in talking:
        workers.append(worker(each))
        workers[-1].publishes_events = True
    return Parts(view(*workers), predicts=PredictionLimits(), predicts_everywhere=False, indexer=indexer)


async def test_without_events_anywhere_no_indexer_is_queried() -> None:
    indexer = ResidentBlocks(failure=Internal("it is not asked"))
    parts = mixed(indexer, 1, 2)
    first = await parts.select(selecting("a", routing(6)))
    second = await parts.select(selecting("b", routing(8)))
    assert (second.rank, second.overlap_blocks, second.load_only) == (first.rank, 6, False)
    assert indexer.queries == []


async def test_workers_without_events_are_predicted_beside_those_with_events() -> None:
    indexer = ResidentBlocks({(2, 0): 3})
    parts = mixed(indexer, 1, talking=(2,))
    first = await parts.select(selecting("a", routing(6, constraints=constraints(worker_id=1))))
    assert first.rank.worker_id == 1
    parts.booking_table.free(("a", 0, 1))
    predicted = await parts.select(selecting("b", routing(8)))
    assert (predicted.rank.worker_id, predicted.overlap_blocks) == (1, 6), "more than the 3 of the other"
    assert not predicted.HasField("cursor"), "there are no events of this rank"
    reported = await parts.select(selecting("c", routing(8, constraints=constraints(worker_id=2))))
    assert (reported.overlap_blocks, reported.cursor.next_event_id) == (3, 7)


async def test_nothing_is_predicted_of_workers_with_events() -> None:
    parts = mixed(ResidentBlocks(), 1, talking=(2,))
    await parts.select(selecting("a", routing(6, constraints=constraints(worker_id=2))))
    assert (await parts.select(selecting("b", routing(6, constraints=constraints(worker_id=2))))).overlap_blocks == 0


async def test_without_an_answer_of_the_indexer_a_mixed_pool_is_routed_by_load() -> None:
    parts = mixed(ResidentBlocks(failure=Internal("away")), 1, talking=(2,))
    await parts.select(selecting("a", routing(6, constraints=constraints(worker_id=1))))
    answer = await parts.select(selecting("b", routing(6)))
    assert (answer.overlap_blocks, answer.load_only) == (0, True)


async def test_content_that_no_event_can_name_is_predicted_behind_the_blocks_of_the_index() -> None:
    indexer = ResidentBlocks({(2, 0): 3})
    parts = mixed(indexer, talking=(2,))
    plain = await parts.select(selecting("a", routing(8)))
    assert (plain.overlap_blocks, len(parts.router.predictions or ())) == (3, 0)
    first = await parts.select(selecting("b", routing(8, indexed_blocks=3)))
    assert (first.overlap_blocks, first.cursor.next_event_id) == (3, 7)
    second = await parts.select(selecting("c", routing(8, tail=1, indexed_blocks=3)))
    assert (second.overlap_blocks, second.cursor.next_event_id) == (8, 7)
    other = await parts.select(selecting("d", routing(8, seed=1, indexed_blocks=3)))
    assert other.overlap_blocks == 3
    indexer.queued[2, 0] = 2  # The engine evicted a block before the content.
    assert (await parts.select(selecting("e", routing(8, tail=1, indexed_blocks=3)))).overlap_blocks == 2
    indexer.queued[2, 0], indexer.incarnation = 3, 2  # It restarted.
    assert (await parts.select(selecting("f", routing(8, tail=1, indexed_blocks=3)))).overlap_blocks <= 3


async def test_a_prediction_behind_the_index_ends_with_its_time() -> None:
    parts = mixed(ResidentBlocks({(2, 0): 3}), talking=(2,))
    await parts.select(selecting("a", routing(8, indexed_blocks=3)))
    parts.now += PredictionLimits().ttl_seconds + 1
    assert (await parts.select(selecting("b", routing(8, indexed_blocks=3)))).overlap_blocks == 3
