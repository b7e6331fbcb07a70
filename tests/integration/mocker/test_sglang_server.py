"""The simulated SGLang server, over its real sockets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq.asyncio
from kvrouter.core import Scope
from kvrouter.devtools.system.ports import free_ports
from kvrouter.mocker.serving.kv_events import KvEventsConfig
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.sglang.app import serving_sglang
from kvrouter.mocker.sglang.load import base_endpoint
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from prometheus_client import CollectorRegistry

from ...unit.engines.events.engine_frames import Engine
from ...waiting import until
from .engine_server import BLOCK, Client, Subscription, applied, blocks_of, replayed

PROMPT = list(range(1, 19))
"""Four full blocks and two tokens."""


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Client]:
    ports = free_ports(4)  # the ranks' events, then their replays
    events = {"endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[2]}", "topic": "kv"}
    known: dict[str, Any] = {
        "sglang": True,
        "block_size": BLOCK,
        "num_blocks": 64,
        "dp_size": 2,
        "clock_factor": 20,
        "kv_events_config": json.dumps({"publisher": "zmq"} | events),
        "enable_prompt_tokens_details": True,
        "lora_modules": {"adapter": "/adapters/1"},
        "disaggregation_bootstrap_port": 0,
        "drain_seconds": 0.1,
        "mean_output_tokens": 0,
    }
    async with (
        serving_sglang(MockerSettings(**(known | options)), CollectorRegistry()) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(server, session)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


def request(tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "routed_dp_rank": 0, "sampling_params": {"max_new_tokens": tokens}} | fields


async def generated(client: Client, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    status, body = await client.post("/generate", request(tokens, **fields))
    assert status == 200, body
    assert isinstance(body, dict)
    return body


async def follow(client: Client, dp_rank: int = 0) -> Engine:
    """Returns what the events of a rank amount to."""
    _, info = await client.get("/server_info")
    port = info["kv_events"]["replay_endpoint_port_base"] + dp_rank
    messages = await replayed(f"tcp://127.0.0.1:{port}")
    return applied(messages, "sglang", CopyCounting.COPY_COUNTING_SET)


def cached(client: Client, dp_rank: int = 0) -> set[int]:
    """Returns the blocks in the engine's cache."""
    return set(client.server.service.drivers[dp_rank].engine.cached_blocks())


async def test_a_server_describes_itself(client: Client) -> None:
    for path in ("/server_info", "/get_server_info"):
        _, info = await client.get(path)
        assert (info["version"], info["page_size"], info["dp_size"]) == ("0.5.23", BLOCK, 2)
        assert (info["disaggregation_mode"], info["context_length"]) == ("null", 64 * BLOCK)
        assert info["kv_events"]["endpoint_host"] == "*"
        assert (info["kv_events"]["block_size"], info["kv_events"]["topic"]) == (BLOCK, "kv")
    _, models = await client.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["mock-model", "adapter"]
    assert await client.get("/health_generate") == (200, "")
    assert await client.metric("sglang:max_total_num_tokens", dp_rank="1") == 64 * BLOCK


async def test_token_ids_go_in_and_come_out(client: Client) -> None:
    body = await generated(client, rid="one")
    meta = body["meta_info"]
    assert len(body["output_ids"]) == meta["completion_tokens"] == 4
    assert (meta["id"], meta["prompt_tokens"], meta["cached_tokens"]) == ("one", len(PROMPT), 0)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert body["text"] == "".join(f" t{token}" for token in body["output_ids"])
    assert (await generated(client))["meta_info"]["cached_tokens"] == 16


async def test_outputs_end_by_themselves_unless_they_ignore_it() -> None:
    async with serving(mean_output_tokens=3, num_blocks=512) as client:
        body = await generated(client, sampling_params={"max_new_tokens": 1000})
        assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
        body = await generated(client, sampling_params={"max_new_tokens": 300, "ignore_eos": True})
        assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        body = await generated(client, sampling_params={"max_new_tokens": 1000, "min_new_tokens": 200})
        assert body["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(body["output_ids"]) >= 200


async def test_outputs_keep_their_constraints() -> None:
    async with serving(num_blocks=512) as client:
        for name, value, pattern in (("regex", "[ab]{5}", "[ab]{5}"), ("json_schema", '{"const": "x"}', '"x"')):
            body = await generated(client, sampling_params={"max_new_tokens": 100, name: value})
            assert re.fullmatch(pattern, body["text"])
            assert body["meta_info"]["finish_reason"]["type"] == "stop"


async def test_chunks_of_a_stream_are_cumulative(client: Client) -> None:
    *chunks, done = [chunk async for chunk in client.stream("/generate", request(stream=True))]
    assert done == "[DONE]"
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 2, 3, 4]
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, True, False]
    assert chunks[-1]["text"].startswith(chunks[0]["text"])


async def test_chunks_are_incremental_if_the_server_is_started_so() -> None:
    async with serving(incremental_streaming_output=True) as client:
        *chunks, _ = [chunk async for chunk in client.stream("/generate", request(stream=True))]
        assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 1, 1, 1]
        assert len((await generated(client))["output_ids"]) == 4


async def test_requests_go_to_the_rank_that_they_name(client: Client) -> None:
    assert (await generated(client, routed_dp_rank=1))["meta_info"]["dp_rank"] == 1
    fields = {"routed_dp_rank": None, "data_parallel_rank": 1}
    assert (await generated(client, **fields))["meta_info"]["cached_tokens"] == 16
    status, body = await client.post("/generate", request(routed_dp_rank=2))
    assert status == 400
    assert "out of range" in body["error"]["message"]


async def test_an_abort_ends_all_requests_with_that_prefix() -> None:
    async with serving(clock_factor=1, speed=0.1, num_blocks=4096) as client:
        streams = {rid: client.stream("/generate", request(10_000, rid=rid, stream=True)) for rid in ("r1", "r10", "s")}
        for stream in streams.values():
            await anext(stream)
        for rid in ("", "r", "unknown"):  # neither is a request
            await client.post("/abort_request", {"rid": rid})
        assert client.server.service.running == 3
        await client.post("/abort_request", {"rid": "r1"})
        for rid in ("r1", "r10"):
            *_, last, done = [chunk async for chunk in streams[rid]]
            assert (last["meta_info"]["finish_reason"]["type"], done) == ("abort", "[DONE]")
        assert client.server.service.request_ids() == ["s"]
        assert await client.metric("sglang:num_running_reqs", dp_rank="0") == 1
        await client.post("/abort_request", {"abort_all": True})
        assert not client.server.service.running
        assert await client.metric("sglang:token_usage", dp_rank="0") == 0
        for stream in streams.values():
            await stream.aclose()  # type: ignore[attr-defined]


async def test_a_client_that_disconnects_aborts_its_request() -> None:
    async with serving(clock_factor=1, speed=0.1, num_blocks=4096) as client:
        stream = client.stream("/generate", request(10_000, stream=True))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: not client.server.service.running)
        assert cached(client)


async def test_events_amount_to_the_cache_of_each_rank(client: Client) -> None:
    for number in range(12):
        prompt = list(range(number, number + 60))
        await generated(client, 8, input_ids=prompt, routed_dp_rank=number % 2)
        await generated(client, routed_dp_rank=number % 2)  # repeats compute their last block twice
    for dp_rank in (0, 1):
        engine = await follow(client, dp_rank)
        assert set(blocks_of(engine)) == cached(client, dp_rank) != set()
        assert engine.overlap(PROMPT) == 4
        assert engine.rank.stats().unknown_removals == 0


async def test_the_first_event_is_that_the_cache_is_empty(client: Client) -> None:
    _, info = await client.get("/server_info")
    (first,) = await replayed(f"tcp://127.0.0.1:{info['kv_events']['replay_endpoint_port_base']}")
    assert first.sequence == 0
    assert b"AllBlocksCleared" in first.payload


async def test_offloaded_blocks_are_events_of_host_memory() -> None:
    async with serving(num_blocks=12, host_blocks=30, dp_size=1) as client:
        await generated(client)
        for number in range(1, 3):
            await generated(client, input_ids=list(range(100 * number, 100 * number + 40)))
        assert (await follow(client)).overlap(PROMPT) == 0, "the device has others"
        again = await generated(client)
        assert again["meta_info"]["cached_tokens"] == 16
        assert client.server.service.drivers[0].host_tokens_total == 16
        engine, host = await follow(client), Tier.TIER_HOST
        assert set(blocks_of(engine)) == set(cached(client)) <= set(blocks_of(engine, host))
        assert 12 < len(blocks_of(engine, host)) <= 30


async def test_adapters_and_salts_have_blocks_of_their_own(client: Client) -> None:
    await generated(client, lora_path="adapter")
    await generated(client, cache_salt="secret")
    engine = await follow(client)
    assert engine.overlap(PROMPT) == 0
    assert engine.overlap(PROMPT, scope=Scope(lora_name="adapter")) == 4
    assert engine.overlap(PROMPT, scope=Scope(cache_salt="secret")) == 4
    assert (await client.post("/generate", request(lora_path="other")))[0] == 400


async def test_a_flush_of_the_cache_is_an_event(client: Client) -> None:
    await generated(client)
    assert await client.get("/flush_cache") == (200, "Cache flushed.\n")
    await generated(client, input_ids=[9] * 8)
    engine = await follow(client)
    assert engine.overlap(PROMPT) == 0
    assert set(blocks_of(engine)) == cached(client) != set()


async def test_the_openai_api_has_the_fields_of_sglang(client: Client) -> None:
    body = {"model": "mock-model:adapter", "prompt": PROMPT, "max_tokens": 4, "stop_token_ids": [1], "rid": "own"}
    status, answer = await client.post("/v1/completions", body | {"routed_dp_rank": 0})
    assert (status, answer["id"], answer["choices"][0]["matched_stop"]) == (200, "own", None)
    assert (await follow(client)).overlap(PROMPT, scope=Scope(lora_name="adapter")) == 4
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", chat))[1]["usage"]["completion_tokens"] == 2
    status, error = await client.post("/v1/completions", {"prompt": [1] * 300})
    assert (status, error["object"], error["code"]) == (400, "error", 400)


async def test_load_is_published_when_it_changes() -> None:
    slow: dict[str, Any] = {"clock_factor": 1, "speed": 0.1, "num_blocks": 4096}
    async with serving(dp_size=1, load_publish_endpoint="tcp://*:0", **slow) as client:
        _, info = await client.get("/server_info")
        events = info["kv_events"]
        assert events["load_topic"] == "load"
        with zmq.asyncio.Context() as context:
            subscription = Subscription(context, f"tcp://127.0.0.1:{events['load_endpoint_port_base']}", b"load")
            stream = client.stream("/generate", request(10_000, stream=True))
            await anext(stream)
            running, waiting, used, total, rank, *_ = 0, 0, 0, 0, 0
            while not running:
                message = await subscription.receive()
                kind, running, waiting, used, total, rank, *_ = msgspec.msgpack.decode(message.payload)
            assert (kind, waiting, total, rank) == ("LoadStat", 0, 4096 * BLOCK, 0)
            assert used >= len(PROMPT)
            await stream.aclose()  # type: ignore[attr-defined]
            context.destroy(linger=0)


@pytest.mark.parametrize(
    ("events", "replays", "load"),
    [(5557, None, 5559), (5557, 5558, 5560), (5557, 5560, 5562), (5557, 6557, 5559), (0, 0, 0)],
)
def test_ports_for_load_follow_those_of_events_and_replays(events: int, replays: int | None, load: int) -> None:
    replay_endpoint = None if replays is None else f"tcp://*:{replays}"
    config = KvEventsConfig(endpoint=f"tcp://*:{events}", replay_endpoint=replay_endpoint)
    assert base_endpoint("auto", config, dp_size=2) == f"tcp://*:{load}"


async def test_free_ports_are_for_one_rank() -> None:
    with pytest.raises(StartRefused, match="successive ports"):
        async with serving(kv_events_config='{"publisher": "zmq", "endpoint": "tcp://*:0"}'):
            pass


async def test_load_is_reported_by_rank(client: Client) -> None:
    _, answer = await client.get("/v1/loads?include=core")
    assert [load["dp_rank"] for load in answer["loads"]] == [0, 1]
    assert answer["loads"][0]["max_total_num_tokens"] == 64 * BLOCK


async def test_prefill_and_decode_meet_in_a_room() -> None:
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        _, info = await prefill.get("/server_info")
        port = info["disaggregation_bootstrap_port"]
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7, "routed_dp_rank": None}
        first, rest = await asyncio.gather(generated(prefill, **room), generated(decode, **room))
        assert (len(first["output_ids"]), len(rest["output_ids"])) == (1, 4)
        assert first["meta_info"]["dp_rank"] == 1  # the room chooses among the ranks
        status, _ = await prefill.post("/generate", request())
        assert status == 400


async def test_a_decode_without_its_prefill_server_fails() -> None:
    (port,) = free_ports(1)
    async with serving(role="decode") as decode:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7}
        status, body = await decode.post("/generate", request(**room))
        assert (status, "KVTransferError" in body["error"]["message"]) == (500, True)
