"""A conversation stays at its rank while that is healthy and not busy."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.routing.affinity import MOST_RUNNING
from kvrouter.v1.common_pb2 import BlockScope

from ..harness import Parts, constraints, routing, selecting, view, worker


def parts(mode: str = "round-robin", *, conversations: int = 100, thresholds: Thresholds | None = None) -> Parts:
    options = RoutingOptions(mode, thresholds=thresholds or Thresholds())
    return Parts(view(worker(1), worker(2), worker(3)), options=options, conversations=conversations)


async def sent(to: Parts, request_id: str, conversation: str = "", **fields: Any) -> int:
    booking_context = routing(2, seed=crc32(request_id.encode()) % 1000, conversation_id=conversation, **fields)
    return (await to.select(selecting(request_id, booking_context))).rank.worker_id


@pytest.mark.parametrize("mode", ["kv", "round-robin", "random", "power-of-two"])
async def test_it_stays_in_every_mode(mode: str) -> None:
    scheduler = parts(mode)
    first = await sent(scheduler, "first", "talk")
    for number in range(9):
        await sent(scheduler, f"other{number}")
        assert await sent(scheduler, f"next{number}", "talk") == first
        scheduler.booking_table.free((f"next{number}", 0, 1))


async def test_many_requests_at_once_are_no_conversation() -> None:
    scheduler = parts()
    names = [f"r{number}" for number in range(MOST_RUNNING + 4)]
    ranks = [await sent(scheduler, name, "constant") for name in names]
    assert len(set(ranks[: MOST_RUNNING + 1])) == 1
    assert set(ranks[MOST_RUNNING + 1 :]) == {1, 2, 3}
    for name in names[1:]:
        scheduler.booking_table.free((name, 0, 1))
    assert await sent(scheduler, "later", "constant") == ranks[-1]


async def test_without_a_conversation_nothing_sticks() -> None:
    scheduler = parts()
    assert {await sent(scheduler, f"r{number}") for number in range(3)} == {1, 2, 3}


async def test_conversations_of_another_tenant_are_others() -> None:
    scheduler = parts()
    at = {await sent(scheduler, f"r{number}", "talk", scope=BlockScope(tenant=f"t{number}")) for number in range(3)}
    assert at == {1, 2, 3}


async def test_it_leaves_a_busy_rank_and_stays_where_it_went() -> None:
    scheduler = parts("kv", thresholds=Thresholds(decode_blocks=0.5))
    first = await sent(scheduler, "first", "talk")
    heavy = routing(60, constraints=constraints(worker_id=first))
    await scheduler.select(selecting("heavy", heavy))
    second = await sent(scheduler, "second", "talk")
    assert second != first
    scheduler.booking_table.free(("heavy", 0, 1))
    assert await sent(scheduler, "third", "talk") == second


async def test_it_leaves_a_rank_that_is_gone_or_excluded() -> None:
    scheduler = parts()
    first = await sent(scheduler, "first", "talk")
    excluded = await sent(scheduler, "second", "talk", constraints=constraints(excluded_worker_ids=[first]))
    assert excluded != first
    scheduler.registered.register(view(*(worker(each) for each in (1, 2, 3) if each != excluded)))
    assert await sent(scheduler, "third", "talk") != excluded


async def test_a_question_without_booking_follows_and_moves_nothing() -> None:
    scheduler = parts()
    first = await sent(scheduler, "first", "talk")
    pinned = routing(2, conversation_id="talk", constraints=constraints(worker_id=first % 3 + 1))
    await scheduler.select(selecting(None, pinned))
    assert (await scheduler.select(selecting(None, routing(2, conversation_id="talk")))).rank.worker_id == first


async def test_only_the_last_conversations_are_remembered() -> None:
    scheduler = parts(conversations=2)
    first = await sent(scheduler, "first", "a")
    await sent(scheduler, "second", "b")
    await sent(scheduler, "third", "c")
    assert await sent(scheduler, "b again", "b") == 2
    assert await sent(scheduler, "a again", "a") != first
    forgetful = parts(conversations=0)
    assert [await sent(forgetful, f"r{number}", "a") for number in range(3)] == [1, 2, 3]


async def test_the_decision_tells_why_the_others_were_left_out() -> None:
    scheduler = parts("kv")
    first = await sent(scheduler, "first", "talk")
    await sent(scheduler, "second", "talk")
    decided = scheduler.decisions.by_request("second")
    assert decided is not None
    terms = {each.rank.worker_id: each.excluded for each in decided.to_message().candidates}
    assert terms.pop(first) == ""
    assert set(terms.values()) == {"the conversation is at another rank"}
