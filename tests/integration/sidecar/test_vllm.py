"""A sidecar beside a vLLM server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.v1.common_pb2 import BlockScope, Role, Stage
from kvrouter.v1.worker_pb2 import FinishReason, SamplingOptions, TransferParams

from ...waiting import until
from .rig import (
    BLOCK,
    ENDLESS,
    ENDLESS_TOKENS,
    Beside,
    EngineServer,
    Sidecar,
    cached,
    cached_tokens_of,
    events_at,
    registration,
    tokens_of,
    vllm,
)

PROMPT = list(range(1, 19))
"""Four full blocks and two tokens."""


@pytest.fixture
def engine() -> EngineServer:
    return vllm(dp_size=2, lora_modules={"adapter": "/adapters/1"}, enable_prompt_tokens_details=True, max_sequences=24)


@pytest.fixture
async def server(engine: EngineServer) -> AsyncIterator[ServedEngine]:
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
    assert found.openai_endpoint == server.url
    assert found.tokenizer == "org/m"
    assert found.engine == "vllm"
    assert list(found.lora_names) == ["adapter"]
    assert found.publishes_events
    assert found.role == Role.ROLE_BOTH


async def test_a_request_runs_on_its_rank_and_its_blocks_are_published(sidecar: Sidecar, server: ServedEngine) -> None:
    first = await sidecar.generate(PROMPT, dp_rank=1)
    assert len(tokens_of(first)) == 4
    assert first[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH
    assert not any(output.finish_reason for output in first[:-1])
    assert len(cached(server, 1)) == 5
    await until(lambda: sidecar.blocks(1) == cached(server, 1))
    assert sidecar.blocks(0) == set()
    again = await sidecar.generate(PROMPT, dp_rank=1)
    assert cached_tokens_of(again) == [4 * BLOCK]
    assert sidecar.count("requests_total", result="finished") == 2


async def test_cached_tokens_that_are_not_reported_are_unknown(run: Beside) -> None:
    engine = vllm()
    async with engine.started(), run(engine.url) as sidecar:
        await sidecar.ready()
        outputs = await sidecar.generate(PROMPT)
    assert len(tokens_of(outputs)) == 4
    assert not any(output.HasField("cached_tokens") for output in outputs)


async def test_outputs_come_as_they_are_generated(sidecar: Sidecar) -> None:
    outputs = await sidecar.generate(PROMPT, max_tokens=8)
    assert len([output for output in outputs if output.token_ids]) > 1


async def test_salt_tenant_and_adapter_are_those_of_the_blocks(sidecar: Sidecar, server: ServedEngine) -> None:
    """Blocks of other scopes are not hit, and the index knows the scope of each."""
    for scope in (BlockScope(), BlockScope(cache_salt="s"), BlockScope(tenant="t"), BlockScope(lora_name="adapter")):
        assert cached_tokens_of(await sidecar.generate(PROMPT, scope=scope)) == [0], scope
    await until(lambda: sidecar.blocks() == cached(server))
    chunks = sidecar.worker.rank(0).state_chunks()
    first_blocks = {block.local_hash for chunk in chunks for block in chunk.blocks if block.depth == 0}
    assert len(first_blocks) == 4


async def test_a_caller_that_goes_away_aborts_its_request(run: Beside) -> None:
    engine = vllm(**ENDLESS)
    async with engine.started() as server, run(engine.url) as sidecar:
        await sidecar.ready()
        async for output in sidecar.outputs(PROMPT, max_tokens=ENDLESS_TOKENS):
            assert output.token_ids
            assert server.service.running == 1
            break
        await until(lambda: server.service.running == 0)
        await until(lambda: sidecar.count("requests_total", result="aborted") == 1)


REFUSED: list[tuple[list[int], dict[str, Any]]] = [
    ([1] * 1000, {}),
    (PROMPT, {"scope": BlockScope(lora_name="unknown")}),
    (PROMPT, {"priority": 1}),
    (PROMPT, {"sampling_options": SamplingOptions(n=2)}),
    (PROMPT, {"sampling_options": SamplingOptions(engine_options_json="[")}),
    (PROMPT, {"stage": Stage.STAGE_DECODE, "transfer_params": TransferParams(format="other")}),
]


async def test_what_an_engine_refuses_is_the_fault_of_the_request(sidecar: Sidecar) -> None:
    for number, (tokens, fields) in enumerate(REFUSED, start=1):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sidecar.generate(tokens, **fields)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
        assert sidecar.count("requests_total", result="refused") == number


async def test_the_load_is_the_engines(run: Beside) -> None:
    engine = vllm(dp_size=2, **ENDLESS)
    async with engine.started(), run(engine.url) as sidecar:
        await sidecar.ready()
        running = asyncio.create_task(sidecar.generate(PROMPT, max_tokens=ENDLESS_TOKENS, dp_rank=1))
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 1])
        loads = {each.rank.dp_rank: each for each in sidecar.worker.load_reports()}
        assert loads[1].active_blocks >= 4
        assert loads[1].total_blocks == 1 << 16
        running.cancel()
        await asyncio.wait({running})
        await until(lambda: [each.running_requests for each in sidecar.worker.load_reports()] == [0, 0])


async def test_parameters_of_a_prefill_go_to_the_decode_verbatim(run: Beside) -> None:
    prefill, decode = vllm(role="prefill"), vllm(role="decode")
    async with (
        prefill.started(),
        decode.started(),
        run(prefill.url, role="prefill", component="prefill") as first,
        run(decode.url, role="decode", component="decode") as second,
    ):
        await first.ready()
        await second.ready()
        outputs = await first.generate(PROMPT, max_tokens=50, stage=Stage.STAGE_PREFILL)
        (parameters,) = [output.transfer_params for output in outputs if output.HasField("transfer_params")]
        assert parameters.format == "vllm-json"
        assert len(tokens_of(outputs)) == 1
        decoded = await second.generate(PROMPT, stage=Stage.STAGE_DECODE, transfer_params=parameters)
        assert len(tokens_of(decoded)) == 4
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.generate(
                PROMPT,
                stage=Stage.STAGE_DECODE,
                transfer_params=TransferParams(format="vllm-json", payload=b'{"do_remote_prefill": true}'),
            )
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_engine_that_is_loading_is_waited_for(run: Beside) -> None:
    engine = vllm()
    async with run(engine.url) as sidecar, engine.started(loading_seconds=0.5) as server:
        await sidecar.ready()
        assert len(tokens_of(await sidecar.generate(PROMPT))) == 4
        await until(lambda: server.service.running == 0)


async def test_an_engine_that_restarts_is_served_again(run: Beside, engine: EngineServer) -> None:
    async with run(engine.url, engine_grace_seconds=1) as sidecar:
        async with engine.started() as server:
            await sidecar.ready()
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
        await until(lambda: not sidecar.health.ready)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sidecar.generate(PROMPT)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        async with engine.started() as server:
            await sidecar.ready()
            await until(lambda: sidecar.blocks() == set())
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
        assert sidecar.count("outages_total") >= 1


async def test_an_engine_that_restarts_unchanged_keeps_its_worker(run: Beside) -> None:
    engine = vllm(kv_events_config=events_at(*free_ports(2)))
    async with run(engine.url) as sidecar:
        async with engine.started() as server:
            await sidecar.ready()
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
        async with engine.started() as server:
            await until(lambda: sidecar.blocks() == set())
            await until(lambda: sidecar.supervisor.is_up and sidecar.worker.is_accepting)
            await sidecar.generate(PROMPT[:9])
            await until(lambda: sidecar.blocks() == cached(server) != set())
        assert sidecar.count("registrations_total") == 1


async def test_an_engine_that_restarts_with_other_properties_is_registered_anew(
    run: Beside, namespace: str, etcd_endpoint: str
) -> None:
    engine = vllm()
    async with run(engine.url, max_model_len=256) as sidecar:
        async with engine.started():
            await sidecar.ready()
            before = sidecar.worker.incarnation
        async with engine.started(num_blocks=32):
            await until(lambda: sidecar.count("registrations_total") == 2)
            await sidecar.ready()
            found = await registration(namespace, etcd_endpoint, sidecar.supervisor.options.worker_id)
            assert found.ranks[0].total_blocks == 32
            assert found.ranks[0].incarnation > before
            assert len(tokens_of(await sidecar.generate(PROMPT))) == 4


@pytest.mark.parametrize("changed", [{"block_size": 8}, {"model": "another-model"}], ids=["block size", "model"])
async def test_an_engine_with_another_block_size_or_model_waits_until_it_fits_its_component(
    run: Beside, changed: dict[str, Any]
) -> None:
    engine = vllm()
    async with run(engine.url, max_model_len=0) as sidecar:
        async with engine.started():
            await sidecar.ready()
        async with engine.started(**changed):
            await until(lambda: sidecar.supervisor.is_up and sidecar.supervisor.engine is None)
            assert not sidecar.health.ready
        async with engine.started():
            await sidecar.ready()
            assert len(tokens_of(await sidecar.generate(PROMPT))) == 4


async def test_a_sidecar_that_restarts_resumes_from_its_state(run: Beside, tmp_path: Path) -> None:
    engine = vllm()
    kept: dict[str, Any] = {"worker_id": 7, "state": tmp_path}
    async with engine.started(
        kv_events_config='{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'
    ) as server:
        async with run(engine.url, **kept) as sidecar:
            await sidecar.ready()
            await sidecar.generate(PROMPT)
            await until(lambda: sidecar.blocks() == cached(server) != set())
            incarnation = sidecar.worker.incarnation
        async with run(engine.url, **kept) as sidecar:
            await sidecar.ready()
            assert sidecar.worker.resumed
            assert sidecar.worker.incarnation == incarnation
            assert sidecar.blocks() == cached(server)


async def test_several_engines_behind_one_sidecar(run: Beside, namespace: str, etcd_endpoint: str) -> None:
    first, second = vllm(), vllm()
    async with first.started(), second.started(), run(first.url, second.url, worker_id=5) as sidecar:
        await sidecar.ready()
        endpoints = {
            worker_id: (await registration(namespace, etcd_endpoint, worker_id)).openai_endpoint for worker_id in (5, 6)
        }
        assert endpoints == {5: first.url, 6: second.url}


async def test_an_engine_without_events_is_served_if_that_is_intended(run: Beside) -> None:
    engine = vllm(kv_events_config="")
    async with engine.started(), run(engine.url, kv_events=("none",)) as sidecar:
        await sidecar.ready()
        assert len(tokens_of(await sidecar.generate(PROMPT))) == 4
        assert not sidecar.worker.config.publishes_events
