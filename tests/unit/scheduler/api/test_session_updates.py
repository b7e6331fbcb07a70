"""Sessions apply numbered updates of bookings: as an object, over RPCs, on call streams."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.error_encoding import from_parts
from kvrouter.v1.errors import BadRequest, NotFound, UnknownModel
from kvrouter.v1.scheduler_pb2 import BookingUpdate, FreeRequest

from ..harness import Parts, ResidentBlocks, routing, selecting, view, worker
from .session_client import expire, free, opened, output, prefilled, reassert


async def test_refusals_are_typed_and_the_session_goes_on(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        with pytest.raises(UnknownModel):
            await client.select("a", request=routing(model="other"))
        with pytest.raises(BadRequest) as caught:
            await client.update(free("a"), number=0)
        assert caught.value.info.field == "first_number"
        with pytest.raises(BadRequest):
            await client.update(*[free("a")] * 2, number=(1 << 64) - 1)
        await client.select("a")
        response = await client.update(
            BookingUpdate(),
            BookingUpdate(free=FreeRequest()),
            reassert("b", blocks=3),
            reassert("b", component=Component(namespace="ns", name="other")),
            free("a"),
        )
        assert response.acknowledged == 5
        assert [each.number for each in response.refused] == [1, 2, 3, 4]
        assert all(each.info.advice for each in response.refused)
        unknown = response.refused[3]
        assert isinstance(from_parts(unknown.code, unknown.message, unknown.info), NotFound)
        assert parts.idle()


async def test_a_defect_costs_its_update_only(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(view(worker(1)))
    monkeypatch.setattr(parts.updates, "report_output", lambda _: 1 / 0)
    async with opened(parts, transport) as client:
        await client.select("a")
        response = await client.update(output("a", 16), free("a"))
        assert [each.number for each in response.refused] == [1]
        assert parts.idle()


async def test_another_scheduler_takes_live_bookings_over(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.update(reassert("a", output_tokens=20))
        assert parts.load(1) == (6, 32, 1)
        # Re-asserted with more progress: merged by maximum.
        await client.update(reassert("a", output_tokens=3, prefill_complete=True))
        assert parts.load(1) == (6, 0, 1)
        assert (await client.select("a")).repeated
        await client.update(free("a"), reassert("a"))
        assert parts.idle()


async def test_a_booking_of_a_worker_that_is_not_registered_is_taken_over_all_the_same() -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts) as client:
        await client.update(reassert("a", worker_id=9))
        assert parts.load(9)[2] == 1
        await client.update(free("a"))
    assert parts.idle()


async def test_a_leased_booking_moves_into_the_session_that_reasserts_it() -> None:
    parts = Parts(view(worker(1)), grace=10)
    await parts.select(selecting("a", lease_ms=1000))
    async with opened(parts) as client:
        await client.update(reassert("a"))
        expire(parts, 1000)
        assert parts.load(1)[2] == 1
        await client.close()
    expire(parts, 10)
    assert parts.idle()


async def test_an_update_that_is_repeated_is_applied_once(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.select("a")
        for _ in range(3):
            assert (await client.update(prefilled("a"), free("a"), number=1)).acknowledged == 2
        assert (await client.update(free("a"), free("b"), number=2)).acknowledged == 3
    assert parts.figure("kvrouter_scheduler_unknown_frees_total") == 1, "that of b"


async def test_an_update_ahead_of_an_earlier_one_is_not_applied(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.select("a")
        assert (await client.update(free("a"), number=2)).acknowledged == 0
        assert parts.load(1)[2] == 1
        assert (await client.update(prefilled("a"), free("a"), number=1)).acknowledged == 2
        assert parts.idle()


async def test_an_opening_says_which_updates_are_missing(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        await client.select("a")
        await client.update(prefilled("a"), output("a", 16))
        await client.close()
        assert (await client.open("a", first_update=1)).acknowledged == 2
        # Updates up to 6 went to another Scheduler meanwhile.
        assert (await client.open("a", first_update=7)).acknowledged == 6
        assert (await client.update(free("a"), number=7)).acknowledged == 7
    assert parts.idle()


async def test_a_free_that_overtakes_its_selection_leaves_a_tombstone(transport: str) -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        selecting = asyncio.create_task(client.select("a"))
        await indexer.queried()
        await client.update(free("a"))
        indexer.may_answer.set()
        with pytest.raises(Exception, match="freed already"):
            await selecting
        assert (await client.update(reassert("a"))).acknowledged == 2
        assert parts.idle()


async def test_selections_run_beside_each_other_and_updates_overtake_them(transport: str) -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1), worker(2)), indexer=indexer)
    async with opened(parts, transport) as client, asyncio.TaskGroup() as group:
        selections = [group.create_task(client.select(f"r{n}", request=routing(4, seed=n))) for n in range(10)]
        assert (await client.update(free("nobody's"))).acknowledged == 1
        assert not any(each.done() for each in selections)
        indexer.may_answer.set()
        assert {(await each).rank.worker_id for each in selections} == {1, 2}
