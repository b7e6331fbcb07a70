"""Routing in the program's own process, with workers behind real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from kvrouter.client import AllBusy, BadRequest, ClientClosed, NotReady, UnknownModel
from kvrouter.devtools.system.ports import free_port
from kvrouter.mocker import app as mocker_app
from kvrouter.mocker.settings import MockerSettings
from kvrouter.router import Router
from kvrouter.runtime.telemetry.metrics import new_registry

MODEL = "mock-model"
PROMPT = range(1, 258)


@pytest.fixture
async def where(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[dict[str, Any]]:
    """Where two workers are registered."""
    where = {"nats": nats_url, "etcd": etcd_endpoint, "namespace": namespace}
    async with AsyncExitStack() as stack:
        for worker_id in (1, 2):
            settings = MockerSettings(
                **where, worker_id=worker_id, clock_factor=20.0, num_blocks=512, drain_seconds=0.2, mean_output_tokens=0
            )
            worker = await stack.enter_async_context(mocker_app.running(settings, new_registry()))
            await worker.registered()
        yield where


async def until_idle(router: Router) -> None:
    """Returns when the router knows both workers, and neither has a booking, which would make it cost more."""
    async with asyncio.timeout(30):
        while {each["worker_id"]: each["active_requests"] for each in await router.get_potential_loads(PROMPT)} != {
            1: 0,
            2: 0,
        }:
            await asyncio.sleep(0.01)


async def until_indexed(router: Router, worker_id: int) -> None:
    """Returns when the router's index has the prompt on that worker only, and no booking is left."""
    async with asyncio.timeout(30):
        while await router.find_matches_for_request(PROMPT) != {worker_id: 16}:
            await asyncio.sleep(0.01)
    await until_idle(router)


async def test_a_router_has_the_calls_of_the_client(where: dict[str, Any]) -> None:
    async with Router(**where, model=MODEL, router_mode="kv") as router:
        await until_idle(router)
        generation = await router.generate(PROMPT)
        assert len(await generation.tokens()) == 16
        holder = generation.routing.worker_id
        await until_indexed(router, holder)
        worker_id, dp_rank, overlap_blocks = await router.best_worker(PROMPT, request_id="mine")
        assert (worker_id, dp_rank, overlap_blocks) == (holder, 0, 16)
        loads = {load["worker_id"]: load["active_requests"] for load in await router.get_potential_loads(PROMPT)}
        assert loads == {holder: 1, 3 - holder: 0}
        with pytest.raises(AllBusy):
            await router.generate(
                PROMPT, worker_id=holder, router_config_override={"active_decode_blocks_threshold": 0.0}
            )
        assert await router.mark_prefill_complete("mine")
        assert await router.free("mine")
        async with await router.direct(3 - holder, PROMPT) as generation:
            assert generation.routing.worker_id == 3 - holder
        assert json.loads(await router.dump_events())
        with pytest.raises(UnknownModel) as unknown:
            await router.generate(PROMPT, "no-such-model")
        assert unknown.value.known_values == (MODEL,)
    with pytest.raises(ClientClosed):
        await router.list_models()


async def test_a_program_may_have_several_routers(where: dict[str, Any]) -> None:
    async with Router(**where, model=MODEL, router_mode="kv") as second:
        async with Router(**where, model=MODEL, router_mode="kv") as first:
            await until_idle(first)
            async with await first.direct(2, PROMPT) as generation:
                await generation.tokens()
            await until_indexed(first, 2)
        # The other one goes on, with an index of its own.
        await until_indexed(second, 2)
        async with await second.generate(PROMPT) as generation:
            assert (generation.routing.worker_id, generation.routing.overlap_blocks) == (2, 16)


async def test_a_router_without_servers_is_not_ready() -> None:
    nobody = f"127.0.0.1:{free_port()}"
    router = Router(nats=f"nats://{nobody}", etcd=nobody, model=MODEL, ready_seconds=0.2)
    with pytest.raises(NotReady, match="NATS and etcd"):
        async with router:
            pass


@pytest.mark.parametrize(
    ("options", "field"),
    [({"router_mood": "kv"}, "router_mood"), ({"router_mode": "no-such-mode"}, "router_mode")],
)
def test_an_invalid_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        Router(**options)
    assert refused.value.field == field
