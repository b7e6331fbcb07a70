"""Programs written for Dynamo's KvPushRouter run with another import: its four patterns of routing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from kvrouter.client import BadRequest, Client
from kvrouter.client.dynamo import DistributedRuntime, Endpoint, KvPushRouter, KvRouterConfig
from kvrouter.devtools.system.stack import Stack

MODEL = "mock-model"
TOKENS = list(range(1, 257))
BLOCK_SIZE = 16

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def endpoint(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    monkeypatch.setenv("KVROUTER_FRONTEND", stack.frontend)
    runtime = DistributedRuntime.detached()
    return runtime.namespace(stack.options.namespace).component(stack.options.component).endpoint("generate")


@pytest_asyncio.fixture(loop_scope="session")
async def router(endpoint: Endpoint) -> AsyncIterator[KvPushRouter]:
    router = KvPushRouter(endpoint=endpoint, block_size=BLOCK_SIZE, kv_router_config=KvRouterConfig())
    yield router
    await router.aclose()


async def test_automatic_routing(router: KvPushRouter) -> None:
    stream = await router.generate(
        token_ids=TOKENS,
        model=MODEL,
        stop_conditions={"max_tokens": 20, "ignore_eos": True},
        sampling_options={"temperature": 0.7, "top_p": 0.9},
        router_config_override={"overlap_score_weight": 2.0, "router_temperature": 0.5},
    )
    generated = []
    async for response in stream:
        if isinstance(response, dict) and "token_ids" in response:
            generated.extend(response["token_ids"])
    assert len(generated) == 20


async def test_manual_state(router: KvPushRouter, stack: Stack) -> None:
    worker_id, overlap = await router.best_worker_id(TOKENS, request_id="req-123")
    assert worker_id
    assert overlap >= 0
    response = await router.generate(TOKENS, request_id="req-123")
    first = await anext(response)
    assert first["token_ids"]
    await router.mark_prefill_complete("req-123")
    async for _ in response:
        pass
    await router.free("req-123")
    async with Client(stack.frontend, model=MODEL) as client, asyncio.timeout(30):
        while any(load["active_requests"] for load in await client.get_potential_loads(TOKENS)):
            await asyncio.sleep(0.02)


async def test_several_routers_are_asked(router: KvPushRouter, endpoint: Endpoint) -> None:
    router_2 = KvPushRouter(endpoint=endpoint, block_size=BLOCK_SIZE)
    _, overlap_1 = await router.best_worker_id(TOKENS)
    worker_id, overlap_2 = await router_2.best_worker_id(TOKENS)
    chosen = router if overlap_1 > overlap_2 else router_2
    stream = await chosen.generate(TOKENS, model=MODEL, worker_id=worker_id)
    assert [response["routing"]["worker_id"] async for response in stream if response["routing"]] == [worker_id]
    await router_2.aclose()


async def test_a_rule_on_potential_loads(router: KvPushRouter) -> None:
    loads = await router.get_potential_loads(TOKENS)
    best_worker = min(loads, key=lambda x: x["potential_prefill_tokens"])
    stream = await router.generate(
        TOKENS, model=MODEL, worker_id=best_worker["worker_id"], stop_conditions={"max_tokens": 20}
    )
    assert [response async for response in stream]


async def test_a_program_that_closes_nothing_ends(endpoint: Endpoint) -> None:
    def program() -> int:
        async def main() -> int:
            router = KvPushRouter(endpoint=endpoint, block_size=BLOCK_SIZE)
            worker_id, _, _ = await router.best_worker(TOKENS)
            return worker_id

        return asyncio.run(main())

    assert await asyncio.to_thread(program)


async def test_what_cannot_be_honoured_is_refused(endpoint: Endpoint, stack: Stack) -> None:
    with pytest.raises(BadRequest, match="block size 16, received 64"):
        await KvPushRouter(endpoint, 64).best_worker(TOKENS)
    elsewhere = DistributedRuntime(stack.frontend).namespace("other").component("c").endpoint("generate")
    with pytest.raises(BadRequest, match=r"no component is named 'other/c'\. Use one of"):
        await KvPushRouter(elsewhere, BLOCK_SIZE).best_worker(TOKENS)
    with pytest.raises(BadRequest, match="overlap_score_weight cannot be set"):
        KvRouterConfig(overlap_score_weight=2.0)


async def test_every_client_has_the_older_name(stack: Stack) -> None:
    async with Client(stack.frontend, model=MODEL) as client:
        worker_id, overlap = await client.best_worker_id(TOKENS)
        assert worker_id
        async with asyncio.timeout(30):
            while overlap != (await client.best_worker(TOKENS)).overlap_blocks:  # Events may come between the calls.
                _, overlap = await client.best_worker_id(TOKENS)
