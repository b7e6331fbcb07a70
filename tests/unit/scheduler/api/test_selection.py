"""A selection from request to booking: which rank it chooses, and what it books there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.policies.cache_aware import KvPolicy
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Explanation, Wait
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.common_pb2 import Component, Role, Stage
from kvrouter.v1.errors import NoWorkers
from kvrouter.v1.names import ComponentName

from ..harness import BLOCK, Parts, ResidentBlocks, constraints, hashed, overrides, routing, selecting, view, worker


async def test_it_books_the_tokens_that_are_not_resident() -> None:
    parts = Parts(view(worker(1), worker(2)), indexer=ResidentBlocks({(2, 0): 3}))
    chosen = await parts.select(selecting("a", routing(4, tail=5)))
    assert (chosen.rank.worker_id, chosen.endpoint, chosen.role) == (2, "host:2", Role.ROLE_UNSPECIFIED)
    assert (chosen.overlap_blocks, chosen.prompt_blocks, chosen.mode) == (3, 4, "kv")
    assert (chosen.cursor.incarnation, chosen.cursor.next_event_id) == (1, 7)
    assert not chosen.load_only
    assert not chosen.repeated
    assert parts.load(2) == (5, BLOCK + 5, 1)
    assert parts.load(1) == (0, 0, 0)


async def test_without_a_booking_nothing_is_booked() -> None:
    parts = Parts(view(worker(1)))
    chosen = await parts.select(selecting(None))
    assert chosen.decision_id
    assert parts.idle()


async def test_a_burst_spreads_over_the_ranks() -> None:
    parts = Parts(view(*[worker(number) for number in range(1, 9)]), indexer=ResidentBlocks())
    await asyncio.gather(*[parts.select(selecting(f"r{n}", routing(4, seed=n))) for n in range(100)])
    requests = [parts.load(number)[2] for number in range(1, 9)]
    assert sum(requests) == 100
    assert max(requests) - min(requests) <= 1


async def test_tokens_and_hashes_are_booked_alike() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a", routing(4)))
    await parts.select(selecting("b", hashed(4)))
    assert parts.load(1) == (4, 128, 2)


@pytest.mark.parametrize(
    ("limits", "rank"),
    [
        ({"required_labels": {"zone": "b"}}, (2, 0)),
        ({"allowed_worker_ids": [2]}, (2, 0)),
        ({"excluded_worker_ids": [1]}, (2, 0)),
        ({"dp_rank": 1}, (1, 1)),
        ({"worker_id": 1, "dp_rank": 1}, (1, 1)),
    ],
)
@pytest.mark.parametrize("mode", POLICIES)
async def test_constraints_override_the_cost(mode: str, limits: dict[str, Any], rank: tuple[int, int]) -> None:
    workers = [worker(1, ranks=2, labels={"zone": "a"}), worker(2, labels={"zone": "b"})]
    parts = Parts(view(*workers), indexer=ResidentBlocks({(1, 0): 4}), options=RoutingOptions(mode))
    if mode == "direct":
        limits = {"worker_id": rank[0], **limits}
    chosen = await parts.select(selecting("a", routing(constraints=constraints(**limits))))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == rank


async def test_round_robin_takes_turns_with_and_without_booking() -> None:
    parts = Parts(view(worker(1, ranks=2), worker(2)), options=RoutingOptions(mode="round-robin"))
    chosen = [await parts.select(selecting(name)) for name in ("a", None, "b", None)]
    assert [(each.rank.worker_id, each.rank.dp_rank) for each in chosen] == [(1, 0), (1, 1), (2, 0), (1, 0)]


async def test_direct_goes_to_the_named_worker() -> None:
    parts = Parts(view(worker(1, ranks=2), worker(2)), options=RoutingOptions(mode="direct"))
    request = routing(constraints=constraints(worker_id=1, dp_rank=1))
    chosen = await parts.select(selecting("a", request))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == (1, 1)
    request = routing(constraints=constraints(worker_id=1))
    chosen = await parts.select(selecting("b", request))
    assert (chosen.rank.worker_id, chosen.rank.dp_rank) == (1, 0)


async def test_decode_stages_book_no_prefill() -> None:
    parts = Parts(view(worker(1)))
    await parts.select(selecting("a", stage=Stage.STAGE_DECODE))
    assert parts.load(1) == (4, 0, 1)


async def test_prefill_stages_go_to_the_pool_for_prefill() -> None:
    prefill = ComponentName("ns", "prefill")
    parts = Parts(
        view(worker(1, role=Role.ROLE_DECODE), role=Role.ROLE_DECODE),
        view(worker(9, role=Role.ROLE_PREFILL), name=prefill, role=Role.ROLE_PREFILL),
    )
    whole = await parts.select(selecting("a"))
    before = await parts.select(selecting("a", stage=Stage.STAGE_PREFILL))
    assert (whole.rank.worker_id, whole.component.name) == (1, "pool")
    assert (before.rank.worker_id, before.component.name) == (9, "prefill")
    named = routing(component=Component(namespace="ns", name="prefill"))
    assert (await parts.select(selecting(None, named))).rank.worker_id == 9


async def test_of_two_components_the_larger_serves_the_model() -> None:
    other = ComponentName("ns", "a-larger-pool")
    parts = Parts(view(worker(1)), view(worker(8), worker(9), name=other))
    assert (await parts.select(selecting("a"))).component.name == "a-larger-pool"


async def test_without_a_queue_a_request_waits_in_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvPolicy, "decide", lambda *_: Wait(1, Explanation("no room")))
    parts = Parts(view(worker(1), worker(2)), max_queued_requests=0)
    assert (await parts.select(selecting("a"))).rank.worker_id == 2


WORKERS = st.lists(st.integers(1, 6), unique=True, max_size=6)


@settings(max_examples=200)
@given(
    registered=st.sets(st.integers(1, 6), min_size=1),
    draining=st.sets(st.integers(1, 6)),
    allowed=WORKERS,
    excluded=WORKERS,
    mode=st.sampled_from(["kv", "random", "round-robin", "power-of-two"]),
    temperature=st.sampled_from([0.0, 5.0]),
)
def test_a_rank_that_is_ruled_out_is_never_chosen(
    registered: set[int], draining: set[int], allowed: list[int], excluded: list[int], mode: str, temperature: float
) -> None:
    parts = Parts(view(*[worker(number, draining=number in draining) for number in registered]))
    request = routing(
        constraints=constraints(allowed_worker_ids=allowed, excluded_worker_ids=excluded),
        overrides=overrides(mode=mode, router_temperature=temperature),
    )
    fit = {number for number in registered - draining - set(excluded) if not allowed or number in allowed}
    call = parts.selector.select(selecting("a", request), deadline=Deadline.never())
    if fit:
        assert asyncio.run(call).rank.worker_id in fit
    else:
        with pytest.raises(NoWorkers):
            asyncio.run(call)
