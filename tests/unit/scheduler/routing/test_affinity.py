"""A conversation prefers the rank of its last request by what that has in its cache, and leaves it for load."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from kvrouter.scheduler.bookings.conversations import MOST_RUNNING
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.v1.common_pb2 import BlockScope

from ..harness import Parts, ResidentBlocks, constraints, routing, selecting, view, worker

CACHE_MODES = ["forecast", "kv", "product", "sticky"]


class Fleet(Parts):
    """Three ranks, and requests by name of their conversation."""

    def __init__(self, mode: str = "forecast", **changes: Any) -> None:
        thresholds = changes.pop("thresholds", Thresholds())
        super().__init__(
            view(worker(1), worker(2), worker(3)), options=RoutingOptions(mode, thresholds=thresholds), **changes
        )
        self._numbers = count()

    async def send(self, conversation: str = "", blocks: int = 8, *, seed: int = 0, **fields: Any) -> tuple[int, str]:
        """Returns the worker of a request, which runs until it is ended, and its id."""
        request_id = f"r{next(self._numbers)}"
        request = routing(blocks, seed=seed, conversation_id=conversation, **fields)
        chosen = (await self.select(selecting(request_id, request))).rank.worker_id
        return chosen, request_id

    async def ask(self, conversation: str = "", blocks: int = 8, *, seed: int = 0, **fields: Any) -> int:
        """Returns the worker of a request that ends at once."""
        chosen, request_id = await self.send(conversation, blocks, seed=seed, **fields)
        self.booking_table.free((request_id, 0, 1))
        return chosen

    async def turns(self, conversation: str, **fields: Any) -> set[int]:
        """Returns the workers of nine turns, each of which extends the one before."""
        return {await self.ask(conversation, 8 + turn, **fields) for turn in range(9)}


@pytest.mark.parametrize("mode", CACHE_MODES)
async def test_without_an_index_a_conversation_stays_in_every_mode_that_reuses_caches(mode: str) -> None:
    fleet = Fleet(mode)
    assert len(await fleet.turns("talk")) == 1
    assert len({await fleet.ask(f"talk {number}", seed=number) for number in range(1, 30)}) > 1


@pytest.mark.parametrize("mode", ["round-robin", "random", "power-of-two"])
async def test_modes_that_ignore_caches_ignore_conversations(mode: str) -> None:
    assert len(await Fleet(mode).turns("talk")) > 1


@pytest.mark.parametrize("mode", ["forecast", "kv"])
async def test_it_leaves_a_rank_where_waiting_costs_more_and_stays_where_it_went(mode: str) -> None:
    fleet = Fleet(mode)
    first = await fleet.ask("talk")
    _, queued = await fleet.send(blocks=60, seed=7, constraints=constraints(worker_id=first))
    second = await fleet.ask("talk", 9)
    assert second != first
    fleet.booking_table.free((queued, 0, 1))
    assert await fleet.ask("talk", 10) == second


async def test_prompts_that_do_not_extend_each_other_are_no_conversation() -> None:
    fleet = Fleet("kv")
    assert {await fleet.ask("constant", seed=seed) for seed in range(30)} == {1, 2, 3}


async def test_many_requests_at_once_are_no_conversation() -> None:
    fleet = Fleet("kv")
    for _ in range(MOST_RUNNING + 2):
        await fleet.send("constant")
    context = fleet.selector.reader.read_request(routing(9, conversation_id="constant"))
    assert fleet.router.conversation(context) is None
    fleet.booking_table.free(("r0", 0, 1))
    fleet.booking_table.free(("r1", 0, 1))
    assert fleet.router.conversation(context) is not None


async def test_conversations_of_another_tenant_are_others() -> None:
    fleet = Fleet("kv")
    await fleet.ask("talk", scope=BlockScope(tenant="one"))
    mine, other = (
        fleet.selector.reader.read_request(routing(9, conversation_id="talk", scope=BlockScope(tenant=tenant)))
        for tenant in ("one", "other")
    )
    assert fleet.router.conversation(mine) is not None
    assert fleet.router.conversation(other) is None


async def test_an_index_knows_better() -> None:
    fleet = Fleet("kv", indexer=ResidentBlocks({(1, 0): 0, (2, 0): 0, (3, 0): 4}))
    first = await fleet.ask("talk", constraints=constraints(worker_id=1))
    assert (first, await fleet.ask("talk", 9)) == (1, 3), "the first rank has evicted the conversation"


async def test_it_leaves_a_busy_excluded_or_restarted_rank() -> None:
    fleet = Fleet("kv", thresholds=Thresholds(decode_blocks=0.5))
    first = await fleet.ask("talk")
    _, large = await fleet.send(blocks=60, seed=7, constraints=constraints(worker_id=first))
    assert await fleet.ask("talk", 9) != first
    fleet.booking_table.free((large, 0, 1))
    second = await fleet.ask("talk", 10)
    assert await fleet.ask("talk", 11, constraints=constraints(excluded_worker_ids=[second])) != second
    context = fleet.selector.reader.read_request(routing(12, conversation_id="talk"))
    held = fleet.router.conversation(context)
    assert held is not None
    restarted = [worker(each, incarnation=2 if each == held.rank[0] else 1) for each in (1, 2, 3)]
    fleet.registered.register(view(*restarted))
    assert (await fleet.select(selecting(None, routing(12, conversation_id="talk")))).overlap_blocks == 0


async def test_a_question_without_booking_moves_nothing() -> None:
    fleet = Fleet("kv")
    first = await fleet.ask("talk")
    pinned = routing(9, conversation_id="talk", constraints=constraints(worker_id=first % 3 + 1))
    await fleet.select(selecting(None, pinned))
    assert (await fleet.select(selecting(None, routing(9, conversation_id="talk")))).rank.worker_id == first


async def test_only_the_last_conversations_are_remembered() -> None:
    fleet = Fleet("kv", conversations=2)
    for number, name in enumerate(("a", "b", "c")):
        await fleet.ask(name, seed=number)
    known = [
        fleet.router.conversation(fleet.selector.reader.read_request(routing(9, seed=number, conversation_id=name)))
        for number, name in enumerate(("a", "b", "c"))
    ]
    assert [held is not None for held in known] == [False, True, True]


async def test_explain_shows_the_blocks_of_the_conversation() -> None:
    fleet = Fleet("kv")
    first = await fleet.ask("talk")
    _, request_id = await fleet.send("talk", 9)
    decided = fleet.decisions.by_request(request_id)
    assert decided is not None
    shown = {
        each.rank.worker_id: dict(each.terms).get("conversation_blocks") for each in decided.to_message().candidates
    }
    assert shown == {first: 8.0} | dict.fromkeys({1, 2, 3} - {first})
