"""A sidecar beside an SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from kvrouter.devtools.system.ports import free_port, free_ports
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.v1.common_pb2 import BlockScope, Role, Stage
from kvrouter.v1.worker_pb2 import FinishReason, TransferParams

from ...waiting import until
from .rig import (
    BLOCK,
    ENDLESS,
    ENDLESS_TOKENS,
    Beside,
    Sidecar,
    cached,
    cached_tokens_of,
    registration,
    sglang,
    tokens_of,
)

PROMPT = list(range(1, 19))
"""Four full blocks and two tokens."""


@pytest.fixture
async def server() -> AsyncIterator[ServedEngine]:
    engine = sglang(
        dp_size=2, lora_modules={"adapter": "/adapters/1"}, enable_prompt_tokens_details=True, max_sequences=24
    )
    async with engine.started() as server:
        yield server


@pytest.fixture
async def sidecar(server: ServedEngine, run: Beside) -> AsyncIterator[Sidecar]:
    async with run(server.url) as sidecar:
        await sidecar.ready()
        yield sidecar


async def test_an_engine_is_registered_with_what_it_says_of_itself(
    sidecar: Sidecar, server: ServedEngine, namespace: str, etcd_endpoint: str
) -> None:
    found = await registration(namespace, etcd_endpoint, sidecar.supervisor.options.worker_id)
    assert (found.model, found.block_size, found.max_model_len) == ("m", BLOCK, 64 * BLOCK)
    assert [(rank.dp_rank, rank.total_blocks) for rank in found.ranks] == [(0, 64), (1, 64)]
    assert found.max_sequences == 24
    assert (found.openai_endpoint, found.tokenizer, found.role) == (server.url, "org/m", Role.ROLE_BOTH)
    assert found.engine == "sglang"
    assert list(found.lora_names) == ["adapter"]


async def test_a_request_runs_on_its_rank_and_its_blocks_are_published(sidecar: Sidecar, server: ServedEngine) -> None:
    first = await sidecar.generate(PROMPT, dp_rank=1)
    assert len(tokens_of(first)) == 4
    assert first[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert len([output for output in first if output.token_ids]) > 1
    await until(lambda: sidecar.blocks(1) == cached(server, 1) != set())
    assert sidecar.blocks(0) == set()
    assert cached_tokens_of(await sidecar.generate(PROMPT, dp_rank=1)) == [4 * BLOCK]


async def test_a_server_that_streams_incrementally(run: Beside) -> None:
    engine = sglang(incremental_streaming_output=True)
    async with engine.started(), run(engine.url) as sidecar:
        await sidecar.ready()
        outputs = await sidecar.generate(PROMPT, max_tokens=6)
        assert len(tokens_of(outputs)) == 6


async def test_salt_tenant_and_adapter_are_those_of_the_blocks(sidecar: Sidecar, server: ServedEngine) -> None:
    for scope in (BlockScope(), BlockScope(cache_salt="s"), BlockScope(tenant="t"), BlockScope(lora_name="adapter")):
        assert cached_tokens_of(await sidecar.generate(PROMPT, scope=scope)) == [0], scope
    await until(lambda: sidecar.blocks() == cached(server))


async def test_a_caller_that_goes_away_aborts_only_its_request(run: Beside) -> None:
    engine = sglang(**ENDLESS)
    async with engine.started() as server, run(engine.url) as sidecar:
        await sidecar.ready()
        received = 0

        async def receive() -> None:
            nonlocal received
            async for _ in sidecar.outputs(PROMPT, max_tokens=ENDLESS_TOKENS, request_id="r10"):
                received += 1

        other = asyncio.create_task(receive())
        await until(lambda: received > 0)
        async for _ in sidecar.outputs(PROMPT, max_tokens=ENDLESS_TOKENS, request_id="r1"):
            assert server.service.running == 2
            break
        await until(lambda: server.service.running == 1)
        before = received
        await until(lambda: received > before)
        other.cancel()
        await asyncio.wait({other})


async def test_what_an_engine_refuses_is_the_fault_of_the_request(sidecar: Sidecar) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sidecar.generate([1] * 1000)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "context length" in str(caught.value.details())


async def test_the_load_is_the_engines(run: Beside) -> None:
    engine = sglang(dp_size=2, **ENDLESS)
    async with engine.started(), run(engine.url) as sidecar:
        await sidecar.ready()
        running = asyncio.create_task(sidecar.generate(PROMPT, max_tokens=ENDLESS_TOKENS, dp_rank=1))
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 1])
        running.cancel()
        await asyncio.wait({running})
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 0])


async def test_a_load_that_the_engine_publishes_is_not_asked_for(run: Beside) -> None:
    load = f"tcp://*:{free_ports(2)[0]}"
    engine = sglang(dp_size=2, load_publish_endpoint=load, **ENDLESS)
    async with engine.started(), run(engine.url, load_seconds=3600) as sidecar:
        await sidecar.ready()
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 0])
        running = asyncio.create_task(sidecar.generate(PROMPT, max_tokens=ENDLESS_TOKENS, dp_rank=1))
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 1])
        assert all(each.total_blocks == 1 << 16 for each in sidecar.worker.load_reports())
        running.cancel()
        await asyncio.wait({running})
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 0])


async def test_the_load_of_an_engine_that_went_away_is_unknown(run: Beside) -> None:
    engine = sglang(load_publish_endpoint=f"tcp://*:{free_port()}")
    async with run(engine.url, load_seconds=3600, engine_grace_seconds=1) as sidecar:
        async with engine.started():
            await sidecar.ready()
            await until(lambda: len(sidecar.worker.load_reports()) == 1)
        await until(lambda: sidecar.worker.load_reports() == [])


async def test_a_decode_can_begin_before_its_prefill_has_ended(run: Beside, namespace: str, etcd_endpoint: str) -> None:
    prefill, decode = sglang(role="prefill", disaggregation_bootstrap_port=0), sglang(role="decode")
    async with (
        prefill.started(),
        decode.started(),
        run(prefill.url) as first,
        run(decode.url, component="decode") as second,
    ):
        await first.ready()
        await second.ready()
        found = await registration(namespace, etcd_endpoint, first.supervisor.options.worker_id)
        assert found.role == Role.ROLE_PREFILL
        assert found.bootstrap_endpoint.startswith("127.0.0.1:")
        outputs = first.outputs(PROMPT, stage=Stage.STAGE_PREFILL)
        parameters = (await anext(outputs)).transfer_params
        assert parameters.format == "sglang-json"
        decoded = await second.generate(PROMPT, stage=Stage.STAGE_DECODE, transfer_params=parameters)
        assert len(tokens_of(decoded)) == 4
        rest = [output async for output in outputs]
        assert rest[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH


async def test_an_aborted_prefill_does_not_wait_for_its_decode(run: Beside) -> None:
    prefill = sglang(role="prefill", disaggregation_bootstrap_port=0)
    async with prefill.started() as server, run(prefill.url) as sidecar:
        await sidecar.ready()
        async for output in sidecar.outputs(PROMPT, stage=Stage.STAGE_PREFILL):
            assert output.HasField("transfer_params")
            break
        await until(lambda: sidecar.count("requests_total", result="aborted") == 1)
        await until(lambda: server.service.running == 0)


async def test_parameters_of_another_engine_are_refused(sidecar: Sidecar) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sidecar.generate(
            PROMPT, stage=Stage.STAGE_DECODE, transfer_params=TransferParams(format="vllm-json", payload=b"{}")
        )
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engine_that_restarts_is_served_again(run: Beside) -> None:
    engine = sglang()
    async with run(engine.url, engine_grace_seconds=1) as sidecar:
        async with engine.started() as server:
            await sidecar.ready()
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
        await until(lambda: not sidecar.health.ready)
        async with engine.started() as server:
            await sidecar.ready()
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
