"""The simulated vLLM server, over its real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
import zmq.asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from kvrouter.core import Scope
from kvrouter.mocker.serving.generations import Sampling, Sequenced
from kvrouter.mocker.serving.tokenizer import decode
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.vllm.app import serving_vllm
from kvrouter.mocker.vllm.transfers import LEASE_SECONDS, KvTransfers
from kvrouter.v1.common_pb2 import CopyCounting, Tier
from prometheus_client import CollectorRegistry

from ...unit.engines.events.engine_frames import Engine
from ...waiting import until
from .engine_server import BLOCK, EVENTS, Client, Subscription, applied, blocks_of, replayed

PROMPT = list(range(1, 19))
"""Four full blocks and two tokens."""


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Client]:
    known: dict[str, Any] = {
        "openai": True,
        "block_size": BLOCK,
        "num_blocks": 64,
        "dp_size": 2,
        "clock_factor": 20,
        "kv_events_config": json.dumps({"enable_kv_cache_events": True} | EVENTS),
        "enable_prompt_tokens_details": True,
        "lora_modules": {"adapter": "/adapters/1"},
        "drain_seconds": 0.1,
        "mean_output_tokens": 0,
    }
    async with (
        serving_vllm(MockerSettings(**(known | options)), CollectorRegistry()) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Client(server, session)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with serving() as client:
        yield client


async def completed(client: Client, *, rank: int = 0, **fields: Any) -> dict[str, Any]:
    status, body = await client.post(
        "/v1/completions",
        {"model": "mock-model", "prompt": PROMPT, "max_tokens": 4} | fields,
        X_data_parallel_rank=str(rank),
    )
    assert status == 200, body
    assert isinstance(body, dict)
    return body


async def follow(client: Client, dp_rank: int = 0) -> Engine:
    """Returns what the events of a rank amount to."""
    _, sources = await client.get("/kv_event_sources")
    messages = await replayed(sources[str(dp_rank)]["replay_endpoint"])
    return applied(messages, "vllm", CopyCounting.COPY_COUNTING_COUNTED)


def cached(client: Client, dp_rank: int = 0) -> dict[int, int]:
    """Returns the copies of each block in the engine's cache."""
    blocks = client.server.service.drivers[dp_rank].engine.cached_blocks()
    return {engine_hash: block.copies for engine_hash, block in blocks.items()}


async def test_a_server_describes_itself(client: Client) -> None:
    assert await client.get("/version") == (200, {"version": "0.33.0"})
    assert await client.get("/health") == (200, "")
    _, models = await client.get("/v1/models")
    assert [(model["id"], model["parent"]) for model in models["data"]] == [
        ("mock-model", None),
        ("adapter", "mock-model"),
    ]
    assert models["data"][0]["max_model_len"] == 64 * BLOCK
    _, sources = await client.get("/kv_event_sources")
    assert [(rank, source["topic"]) for rank, source in sources.items()] == [("0", "kv"), ("1", "kv")]
    assert len({source["endpoint"] for source in sources.values()}) == 2
    assert await client.metric("vllm:cache_config_info", engine="1", block_size="4", num_gpu_blocks="64") == 1


async def test_token_ids_go_in_and_come_out(client: Client) -> None:
    body = await completed(client, return_token_ids=True, request_id="one")
    (choice,) = body["choices"]
    assert body["id"] == "cmpl-one"
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (4, "length")
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["text"] == decode(choice["token_ids"])
    assert body["usage"]["completion_tokens"] == 4
    again = await completed(client)
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_outputs_end_by_themselves_unless_they_ignore_it() -> None:
    async with serving(mean_output_tokens=3, num_blocks=512) as client:
        (choice,) = (await completed(client, max_tokens=1000, return_token_ids=True))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        assert choice["text"] == decode(choice["token_ids"])
        (choice,) = (await completed(client, max_tokens=300, ignore_eos=True, return_token_ids=True))["choices"]
        assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 300)
        (choice,) = (await completed(client, max_tokens=1000, min_tokens=200, return_token_ids=True))["choices"]
        assert choice["finish_reason"] == "stop"
        assert len(choice["token_ids"]) >= 200


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


async def chatted(client: Client, text: str = "Hello", **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    status, body = await client.post("/v1/chat/completions", {"messages": [message], "max_tokens": 200} | fields)
    assert status == 200, body
    assert isinstance(body, dict)
    return body


async def test_outputs_keep_their_constraints() -> None:
    async with serving(num_blocks=512) as client:
        named = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        for fields in ({"response_format": named}, {"structured_outputs": {"json": json.dumps(SCHEMA)}}):
            (choice,) = (await chatted(client, **fields))["choices"]
            assert set(json.loads(choice["message"]["content"])) == {"city"}
            assert choice["finish_reason"] == "stop"
        (choice,) = (await chatted(client, response_format={"type": "json_object"}))["choices"]
        assert json.loads(choice["message"]["content"])
        (choice,) = (await completed(client, structured_outputs={"choice": ["red"]}, max_tokens=50))["choices"]
        assert choice["text"] == "red"
        status, body = await client.post(
            "/v1/completions", {"prompt": PROMPT, "max_tokens": 9, "structured_outputs": {"grammar": "x"}}
        )
        assert (status, body["error"]["param"]) == (400, "structured_outputs")


async def test_tools_are_called_when_they_must_be_or_the_user_asks_for_them() -> None:
    async with serving(num_blocks=512) as client:
        named = {"type": "function", "function": {"name": "get_weather"}}
        asked = {"text": "What is the weather?"}
        forced: list[dict[str, Any]] = [{"tool_choice": "required"}, {"tool_choice": named}, asked]
        for fields in forced:
            (choice,) = (await chatted(client, tools=[TOOL], **fields))["choices"]
            (call,) = choice["message"]["tool_calls"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
            assert call["function"]["name"] == "get_weather"
            assert set(json.loads(call["function"]["arguments"])) == {"city"}
        for fields in ({}, asked | {"tool_choice": "none"}):
            (choice,) = (await chatted(client, tools=[TOOL], **fields))["choices"]
            assert choice["message"]["content"]
        async with openai.AsyncOpenAI(base_url=f"{client.server.url}/v1", api_key="none", max_retries=0) as official:
            chat: Any = {"model": "mock-model", "messages": [{"role": "user", "content": "weather"}], "tools": [TOOL]}
            async with official.chat.completions.stream(**chat) as stream:
                (streamed,) = (await stream.get_final_completion()).choices
        (made,) = streamed.message.tool_calls or []
        assert set(json.loads(made.function.arguments)) == {"city"}


async def test_output_is_drawn_from_the_vocabulary() -> None:
    async with serving(vocabulary_size=3) as client:
        (choice,) = (await completed(client, max_tokens=100, return_token_ids=True))["choices"]
        assert set(choice["token_ids"]) == {0, 1, 2}


async def test_a_stream_has_the_tokens_of_the_whole_response(client: Client) -> None:
    fields = {"seed": 7, "return_token_ids": True, "request_id": "same"}
    whole = await completed(client, **fields)
    body = {"model": "mock-model", "prompt": PROMPT, "max_tokens": 4, "stream": True} | fields
    *chunks, usage, done = [
        chunk async for chunk in client.stream("/v1/completions", body | {"stream_options": {"include_usage": True}})
    ]
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT, None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4


async def test_a_chat_is_a_conversation(client: Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "max_tokens": 8, "return_token_ids": True}
    _, first = await client.post("/v1/chat/completions", asked)
    answer = first["choices"][0]["message"]
    assert answer["role"] == "assistant"
    chunks = [
        chunk
        async for chunk in client.stream(
            "/v1/chat/completions",
            {"messages": [*messages, answer], "max_tokens": 2, "stream": True, "return_token_ids": True},
        )
    ]
    prompt = chunks[0]["prompt_token_ids"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    # The next prompt begins as the first one.
    assert prompt[: len(first["prompt_token_ids"])] == first["prompt_token_ids"]


async def test_choices_and_prompts_are_sequences_of_their_own(client: Client) -> None:
    body = await completed(client, prompt=[[1, 2, 3], [4, 5]], n=2, return_token_ids=True, logprobs=1)
    choices = body["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [len(choice["prompt_token_ids"]) for choice in choices] == [3, 3, 2, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [4] * 4
    assert body["usage"]["prompt_tokens"] == 5


async def test_stop_strings_and_tokens_end_a_sequence(client: Client) -> None:
    (free,) = (await completed(client, seed=1, max_tokens=6, return_token_ids=True))["choices"]
    third = free["token_ids"][2]
    (by_text,) = (await completed(client, seed=1, max_tokens=6, stop=[f" t{third}"]))["choices"]
    assert (by_text["finish_reason"], by_text["stop_reason"]) == ("stop", f" t{third}")
    assert by_text["text"] == "".join(f" t{token}" for token in free["token_ids"][:2])
    (by_token,) = (await completed(client, seed=1, max_tokens=6, stop_token_ids=[third], return_token_ids=True))[
        "choices"
    ]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", third)
    assert (by_token["text"], by_token["token_ids"]) == (by_text["text"], free["token_ids"][:3])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [1 << 32]}, 400, "prompt"),
        ({"prompt": [1] * 256}, 400, "input_tokens"),
        ({"max_tokens": 255}, 400, "input_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"priority": 1}, 400, None),
        ({"stop": "", "n": 1}, 400, "stop"),
        ({"echo": True}, 501, "echo"),
        ({"max_tokens": "many"}, 400, None),
    ],
    ids=str,
)
async def test_refusals_have_the_shape_of_vllm(
    client: Client, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answered, body = await client.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4} | fields)
    assert (answered, body["error"]["code"], body["error"]["param"]) == (status, status, param)


async def test_an_unknown_rank_is_refused(client: Client) -> None:
    status, body = await client.post("/v1/completions", {"prompt": PROMPT}, X_data_parallel_rank="2")
    assert (status, body["error"]["type"]) == (400, "BadRequestError")


async def test_events_amount_to_the_cache_of_each_rank(client: Client) -> None:
    for number in range(12):
        await completed(client, rank=number % 2, prompt=list(range(number, number + 60)), max_tokens=8)
        await completed(client, rank=number % 2)  # repeats compute their last block twice
    for dp_rank in (0, 1):
        engine = await follow(client, dp_rank)
        assert blocks_of(engine) == cached(client, dp_rank) != {}
        assert engine.overlap(PROMPT) == 4


async def test_offloaded_blocks_are_events_of_host_memory() -> None:
    async with serving(num_blocks=12, host_blocks=30, dp_size=1) as client:
        await completed(client)
        for number in range(1, 3):
            await completed(client, prompt=list(range(100 * number, 100 * number + 40)))
        assert (await follow(client)).overlap(PROMPT) == 0, "the device has others"
        again = await completed(client)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        assert client.server.service.drivers[0].host_tokens_total == 16
        engine, host = await follow(client), Tier.TIER_HOST
        assert set(blocks_of(engine)) == set(cached(client)) <= set(blocks_of(engine, host))
        assert 12 < len(blocks_of(engine, host)) <= 30


async def test_adapters_and_salts_have_blocks_of_their_own(client: Client) -> None:
    await completed(client, model="adapter")
    await completed(client, cache_salt="secret")
    engine = await follow(client)
    assert engine.overlap(PROMPT) == 0
    assert engine.overlap(PROMPT, scope=Scope(lora_name="adapter")) == 4
    assert engine.overlap(PROMPT, scope=Scope(cache_salt="secret")) == 4
    assert blocks_of(engine) == cached(client)


async def test_a_reset_of_the_cache_is_an_event(client: Client) -> None:
    await completed(client)
    await client.post("/reset_prefix_cache", None)
    await completed(client, prompt=[9] * 8)
    engine = await follow(client)
    assert engine.overlap(PROMPT) == 0
    assert blocks_of(engine) == cached(client) != {}


async def test_subscribers_get_what_replays_repeat(client: Client) -> None:
    _, sources = await client.get("/kv_event_sources")
    with zmq.asyncio.Context() as context:
        subscription = Subscription(context, sources["0"]["endpoint"])
        live = None
        number = 0
        # A subscription takes effect shortly after the connection.
        while live is None:
            number += 1
            await completed(client, prompt=[number] * 8, max_tokens=1)
            live = await subscription.received_soon()
        await completed(client, prompt=[0] * 8, max_tokens=1)
        messages = [live, await subscription.receive()]
        context.destroy(linger=0)
    again = await replayed(sources["0"]["replay_endpoint"], messages[0].sequence)
    assert again[: len(messages)] == messages


async def test_a_client_that_disconnects_aborts_its_request() -> None:
    async with serving(clock_factor=1, speed=0.1, num_blocks=4096) as client:
        stream = client.stream("/v1/completions", {"prompt": PROMPT, "max_tokens": 10_000, "stream": True})
        await anext(stream)
        assert await client.metric("vllm:num_requests_running", engine="0") == 1
        assert await client.metric("vllm:kv_cache_usage_perc", engine="0") > 0
        await stream.aclose()  # type: ignore[attr-defined]
        service = client.server.service
        await until(lambda: not service.running)
        assert await client.metric("vllm:num_requests_running", engine="0") == 0
        assert await client.metric("vllm:kv_cache_usage_perc", engine="0") == 0
        assert cached(client)  # the prompt's blocks stay cached


async def test_a_loading_server_answers_503() -> None:
    async with serving(loading_seconds=600) as client:
        status, body = await client.get("/health")
        assert (status, body["error"]["type"]) == (503, "ServiceUnavailableError")
        status, _ = await client.post("/v1/completions", {"prompt": PROMPT})
        assert status == 503


async def test_prefill_and_decode_agree_on_a_transfer() -> None:
    request = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    async with serving(role="prefill") as prefill, serving(role="decode") as decode:
        body = await completed(prefill, max_tokens=1, kv_transfer_params=request)
        params = body["kv_transfer_params"]
        assert (params["do_remote_prefill"], params["remote_num_tokens"]) == (True, len(PROMPT))
        assert [len(group) for group in params["remote_block_ids"]] == [5]
        decoded = await completed(decode, kv_transfer_params=params)
        assert decoded["usage"]["completion_tokens"] == 4
        incomplete = {"do_remote_prefill": True}
        assert await refused(decode, kv_transfer_params=incomplete) == 400
        assert await refused(decode, kv_transfer_params=params) == 500  # the blocks are handed over once


async def test_a_decode_fails_if_the_lease_on_its_blocks_has_expired() -> None:
    now = 1000.0
    transfers = KvTransfers(role="prefill", host="127.0.0.1", block_size=BLOCK, clock=lambda: now)
    application = web.Application()
    application.add_routes(transfers.routes())
    async with TestServer(application) as prefill, serving(role="decode") as decode:
        transfers.port = prefill.port or 0
        sequences = [Sequenced(name, PROMPT, Sampling(1)) for name in ("first", "second")]
        offers = [transfers.offer({"do_remote_decode": True}, sequence, 0) for sequence in sequences]
        now += LEASE_SECONDS - 1
        await completed(decode, kv_transfer_params=offers[0])
        now += 1
        assert await refused(decode, kv_transfer_params=offers[1]) == 500


async def refused(client: Client, **fields: Any) -> int:
    """Returns the status of a request that fails."""
    status, body = await client.post("/v1/completions", {"prompt": PROMPT} | fields)
    assert "error" in body
    return int(status)
