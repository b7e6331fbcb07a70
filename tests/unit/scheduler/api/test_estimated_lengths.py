"""Prompts whose length is an estimate: only their engine may say that they are too long."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import read_prompt
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.scheduler_pb2 import FreeRequest

from ..harness import BLOCK, Parts, constraints, hashed, key, routing, selecting, view, worker

MODES = sorted(set(POLICIES) - {"direct"})
"""The modes that choose a worker."""


@pytest.mark.parametrize("make", [routing, hashed])
async def test_a_prompt_beyond_the_longest_sequence_is_booked_with_that(make: Callable[..., RoutingRequest]) -> None:
    parts = Parts(view(worker(1), max_model_len=1000))
    answer = await parts.select(selecting("a", make(90, tail=5, length_is_estimated=True)))
    assert answer.prefill_tokens == 999
    assert answer.prompt_blocks == 999 // BLOCK


def test_a_prompt_beyond_the_limit_of_the_scheduler_is_cut_to_that() -> None:
    request = routing(90, length_is_estimated=True)
    assert read_prompt(request, block_size=BLOCK, max_prompt_tokens=50).tokens == 50


@pytest.mark.parametrize("mode", MODES)
async def test_a_prompt_beyond_every_cache_goes_to_the_largest_at_once(mode: str) -> None:
    workers = [worker(number, total_blocks=blocks) for number, blocks in ((1, 20), (2, 40), (3, 20))]
    parts = Parts(view(*workers), options=RoutingOptions(mode=mode))
    for number in range(3):
        name = f"r{number}"
        answer = await parts.select(selecting(name, routing(500, seed=number, length_is_estimated=True)))
        assert answer.rank.worker_id == 2
        assert answer.prefill_tokens == 40 * BLOCK
        parts.bookings.free(FreeRequest(booking=key(name)))


async def test_of_the_workers_that_a_request_may_use_it_goes_to_the_largest() -> None:
    workers = [worker(number, total_blocks=blocks) for number, blocks in ((1, 20), (2, 40), (3, 30))]
    parts = Parts(view(*workers))
    request = routing(500, length_is_estimated=True, constraints=constraints(excluded_worker_ids=[2]))
    assert (await parts.select(selecting("a", request))).rank.worker_id == 3


async def test_a_prompt_that_some_caches_hold_goes_to_any() -> None:
    parts = Parts(view(worker(1, total_blocks=20), worker(2, total_blocks=40)))
    chosen = set()
    for number in range(8):
        request = routing(10, seed=number, length_is_estimated=True)
        chosen.add((await parts.select(selecting(f"r{number}", request))).rank.worker_id)
    assert chosen == {1, 2}
