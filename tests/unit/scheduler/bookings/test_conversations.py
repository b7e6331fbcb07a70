"""What the requests of a conversation teach: the length of outputs, turns, pauses and hits."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from kvrouter.scheduler.bookings.conversations import LEAST, MAX_TENANTS, Conversations
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.scheduler_pb2 import Decision, FreeRequest
from prometheus_client import CollectorRegistry

from ..harness import POOL, Parts, key, routing, selecting, view, worker


class Fleet(Parts):
    """One rank, and requests that end at once."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(view(worker(1)), **changes)
        self._numbers = count()

    async def ask(
        self,
        conversation: str = "",
        tenant: str = "",
        *,
        output_tokens: int | None = None,
        attempt: int = 0,
        **fields: Any,
    ) -> Decision:
        """Returns the decision on a request with so long an output."""
        name = f"r{next(self._numbers)}"
        request = selecting(name, routing(4, conversation_id=conversation, **fields), attempt=attempt, tenant=tenant)
        response = await self.select(request)
        decision = self.decisions.by_id(response.decision_id)
        assert decision is not None
        ended = FreeRequest(booking=key(name, attempt), cached_tokens=32, output_tokens=output_tokens)
        self.bookings.free(ended)
        return decision.to_message()

    @property
    def pool(self) -> Pool:
        pool = self.pools.get(POOL)
        assert pool is not None
        return pool


async def test_an_output_is_expected_to_be_as_long_as_those_of_its_conversation_its_tenant_or_its_model() -> None:
    fleet = Fleet()
    assert (await fleet.ask("talk", "a")).expected_output_tokens == 0
    for _ in range(LEAST):
        await fleet.ask("talk", "a", output_tokens=100)
        await fleet.ask("other", "a", output_tokens=300)
        await fleet.ask("", "b", output_tokens=800)
    assert (await fleet.ask("talk", "a")).expected_output_tokens == 100
    assert (await fleet.ask("new", "a")).expected_output_tokens == pytest.approx(200)
    assert (await fleet.ask("new", "c")).expected_output_tokens == pytest.approx(400)


async def test_a_request_may_state_the_length_and_a_bound_states_nothing() -> None:
    fleet = Fleet()
    for _ in range(LEAST):
        await fleet.ask("talk", output_tokens=100)
    assert (await fleet.ask("talk", expected_output_tokens=7)).expected_output_tokens == 7
    assert (await fleet.ask("talk", max_output_tokens=7)).expected_output_tokens == 100
    decision = fleet.decisions.newest(1)[0]
    assert decision.context is not None
    assert decision.context.expected_output_tokens == 100, "for policies"


async def test_an_expected_length_of_0_is_refused() -> None:
    with pytest.raises(BadRequest, match="expected_output_tokens is 0"):
        await Fleet().ask("talk", expected_output_tokens=0)


async def test_an_output_that_broke_off_teaches_nothing() -> None:
    fleet = Fleet()
    for _ in range(LEAST):
        await fleet.ask("talk")
    assert (await fleet.ask("talk")).expected_output_tokens == 0


async def test_turns_pauses_and_hits_are_counted_over_all_conversations() -> None:
    fleet = Fleet()
    for turn in range(3):
        await fleet.ask("talk")
        await fleet.ask("")
        fleet.now += 1 + turn
    await fleet.ask("other")
    await fleet.ask("other", attempt=1)
    name = "kvrouter_scheduler_conversation"
    assert [fleet.figure(f"{name}_turns_bucket", le=bound) for bound in ("1.0", "2.0", "4.0")] == [2, 3, 4]
    assert (fleet.figure(f"{name}_pause_seconds_count"), fleet.figure(f"{name}_pause_seconds_sum")) == (2, 3)
    assert fleet.figure(f"{name}_hit_ratio_sum") == pytest.approx(2 * 32 / 64)


async def test_only_the_last_conversations_and_tenants_are_remembered() -> None:
    fleet = Fleet(conversations=2)
    for conversation in ("a", "b", "c"):
        for _ in range(LEAST):
            await fleet.ask(conversation, conversation, output_tokens=ord(conversation))
    assert len(fleet.conversations) == 2
    pool = fleet.pool
    expected = fleet.conversations.expected_output_tokens
    assert expected(pool, b"", "a") == ord("a")
    for number in range(MAX_TENANTS):
        await fleet.ask("", str(number), output_tokens=5)
    assert expected(pool, b"", "a") == pytest.approx(5), "that of the model"


async def test_without_room_for_conversations_none_is_remembered() -> None:
    fleet = Fleet(conversations=0)
    for _ in range(LEAST):
        await fleet.ask("talk", output_tokens=100)
    assert len(Conversations(0, SchedulerMetrics(CollectorRegistry()), lambda: 0.0)) == len(fleet.conversations) == 0
    assert (await fleet.ask("talk")).expected_output_tokens == 100, "that of the tenant"
