"""Anthropic's Messages for engines with an OpenAI API of their own: passed on, or translated to chats and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.frontend.access.key_file import TenantEntry
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.vllm.app import serving_vllm
from prometheus_client import CollectorRegistry

from ....waiting import until
from ..access.keys import Keys
from ..gateway import MODEL, System, running_system
from .test_forwarding import register_engine, start_engine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "Look.", "input_schema": SCHEMA}]
CHUNKS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"reasoning": "Hm."}}]},
    {"choices": [{"index": 0, "delta": {"content": "Look"}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "weather"}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"Rome"}'}}]}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
]
USAGE: dict[str, Any] = {
    "choices": [],
    "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}


@pytest.fixture
async def tokenizing(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> AsyncIterator[System]:
    write_small_tokenizer(tmp_path)
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers={MODEL: str(tmp_path)}) as system:
        yield system


def message(**fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40} | fields


def client_of(system: System, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=f"http://{system.http}", api_key=key, max_retries=0)


async def stream_chat(request: web.Request, body: Any) -> web.StreamResponse:
    if not body.get("stream"):
        function = {"name": "weather", "arguments": '{"city": "Rome"}'}
        call = {"id": "a", "type": "function", "function": function}
        answer = {"role": "assistant", "content": "Look", "reasoning": "Hm.", "tool_calls": [call]}
        choices = [{"index": 0, "message": answer, "finish_reason": "tool_calls"}]
        return web.json_response({"choices": choices, "usage": USAGE["usage"]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    sent = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in [*CHUNKS, USAGE]) + b"data: [DONE]\n\n"
    for at in range(0, len(sent), 11):
        await response.write(sent[at : at + 11])
    return response


async def break_off(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in CHUNKS[:3]:
        await response.write(b"data: %b\n\n" % json.dumps(chunk).encode())
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_an_engine_that_serves_messages_gets_them_unchanged(tokenizing: System, stack: AsyncExitStack) -> None:
    system = tokenizing
    engine = await start_engine(system, stack, 1, engine="vllm")
    await until(lambda: system.frontend.models.has_text(MODEL))
    body = json.dumps(message(field_of_the_engine=[1], system=[{"type": "text", "text": "Help."}]), indent=3).encode()
    url = f"http://{system.http}/v1/messages"
    async with aiohttp.ClientSession() as http, http.post(url, data=body) as response:
        await response.read()
        assert response.status == 200
        assert response.headers["x-kvrouter-routed-on"] == "tokens"
        assert response.headers["x-engine"] == "yes"
    assert engine.bodies == [body]
    await system.until_idle()


async def test_an_engine_counts_where_the_router_has_no_tokenizer(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, tmp_path: Path
) -> None:
    async def count(request: web.Request, body: Any) -> web.StreamResponse:
        assert request.path == "/v1/messages/count_tokens"
        return web.json_response({"input_tokens": 77})

    counted: Any = {"model": MODEL, "messages": message()["messages"]}
    async with running_system(nats_url, etcd_endpoint, namespace) as system, client_of(system) as client:
        engine = await start_engine(system, stack, 1, engine="vllm")
        engine.respond = count
        assert (await client.messages.count_tokens(**counted)).input_tokens == 77
        assert [json.loads(body) for body in engine.bodies] == [counted]
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(**counted | {"model": "other"})
        await system.until_idle()
        # All engines must serve it.
        await start_engine(system, stack, 2)
        with pytest.raises(anthropic.BadRequestError, match="tokenizer"):
            await client.messages.count_tokens(**counted)
        assert len(engine.bodies) == 1
    keys = Keys(tmp_path / "keys.json")
    keys.add("client", models=[MODEL])
    keys.write()
    options: dict[str, Any] = keys.options()
    async with running_system(nats_url, etcd_endpoint, f"{namespace}-keys", **options) as system:
        engine = await start_engine(system, stack, 1, engine="vllm")
        async with client_of(system, keys["client"]) as client:
            with pytest.raises(anthropic.BadRequestError, match="tokenizer"):
                await client.messages.count_tokens(**counted)
        assert engine.bodies == []


async def test_the_router_counts_with_a_tokenizer(tokenizing: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(tokenizing, stack, 1, engine="vllm")
    await until(lambda: tokenizing.frontend.models.has_text(MODEL))
    async with client_of(tokenizing) as client:
        counted = await client.messages.count_tokens(model=MODEL, messages=message()["messages"])
    assert counted.input_tokens > 0
    assert engine.bodies == []


@pytest.mark.parametrize("kind", ["vllm", ""])
async def test_the_official_client_talks_to_an_engine(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, kind: str
) -> None:
    simulated: dict[str, Any] = {"model": MODEL, "dp_size": 2, "num_blocks": 512, "clock_factor": 50}
    settings = MockerSettings(**simulated, bind="127.0.0.1:0", openai=True, mean_output_tokens=0)
    async with running_system(nats_url, etcd_endpoint, namespace) as system, client_of(system) as client:
        server = await stack.enter_async_context(serving_vllm(settings, CollectorRegistry()))
        await register_engine(system, stack, 1, server.url, engine=kind)
        whole = await client.messages.create(**message())
        assert whole.stop_reason == "max_tokens"
        assert whole.usage.output_tokens == 40
        (text,) = whole.content
        assert text.type == "text"
        assert text.text
        async with client.messages.stream(**message(extra_body={"temperature": 0})) as stream:
            streamed = await stream.get_final_message()
        assert streamed.stop_reason == "max_tokens"
        assert streamed.usage.output_tokens == 40
        called = await client.messages.create(
            **message(messages=[{"role": "user", "content": "What is the weather?"}], max_tokens=200), tools=TOOLS
        )
        (call,) = called.content
        assert call.type == "tool_use"
        assert call.name == "weather"
        assert set(call.input) == {"city"}
        assert called.stop_reason == "tool_use"
        await system.until_idle()


async def test_a_chat_of_an_engine_is_translated_as_it_arrives(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, client_of(system) as client:
        engine = await start_engine(system, stack, 1)
        engine.respond = stream_chat
        whole = await client.messages.create(**message(tools=TOOLS, stop_sequences=["x"]))
        async with client.messages.stream(**message(tools=TOOLS)) as stream:
            streamed = await stream.get_final_message()
        for answer in (whole, streamed):
            thinking, text, call = [block.to_dict() for block in answer.content]
            assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.")
            assert (text["type"], text["text"]) == ("text", "Look")
            assert call == {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
            assert answer.stop_reason == "tool_use"
            assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (5, 4)
            assert answer.usage.output_tokens == 5
        chat = json.loads(engine.bodies[0])
        assert chat["messages"] == [{"role": "user", "content": "Hello"}]
        assert chat["stop"] == ["x"]
        assert chat["tools"][0]["function"]["parameters"] == SCHEMA
        assert json.loads(engine.bodies[1])["stream_options"] == {"include_usage": True}
        image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
        await client.messages.create(**message(messages=[{"role": "user", "content": [image]}]))
        sent = json.loads(engine.bodies[2])["messages"][0]["content"]
        assert sent == [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
        await system.until_idle()


@pytest.mark.parametrize("kind", ["vllm", ""])
async def test_failures_of_engines_have_the_form_of_the_api(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, kind: str
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, client_of(system) as client:
        engine = await start_engine(system, stack, 1, engine=kind)
        engine.respond = break_off
        with pytest.raises(anthropic.APIStatusError) as failed:
            async with client.messages.stream(**message()) as stream:
                await stream.get_final_message()
        assert failed.value.body["type"] == "error"  # type: ignore[index]

        async def refuse(request: web.Request, body: Any) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no such thing", "type": "BadRequestError"}}, status=400)

        engine.respond = refuse
        with pytest.raises(anthropic.BadRequestError, match="no such thing"):
            await client.messages.create(**message())

        async def full(request: web.Request, body: Any) -> web.StreamResponse:
            return web.json_response({"error": {"message": "full", "type": "Busy"}}, status=429)

        engine.respond = full
        with pytest.raises(anthropic.RateLimitError, match="full"):
            await client.messages.create(**message())
        await system.until_idle()


async def test_an_isolated_tenant_is_served_by_chats_that_have_its_salt(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, tmp_path: Path
) -> None:
    keys = Keys(tmp_path / "keys.json")
    keys.add("inmate", tenant="t", models=[MODEL])
    keys.add("other", tenant="u", models=[MODEL])
    keys.tenants = [TenantEntry(name="t", isolated=True)]
    keys.write()
    options: dict[str, Any] = keys.options()
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as system:
        engine = await start_engine(system, stack, 1, engine="vllm")
        engine.respond = stream_chat
        async with client_of(system, keys["inmate"]) as client:
            answer = await client.messages.create(**message())
            assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        sent = json.loads(engine.bodies[0])
        assert sent["cache_salt"]
        assert sent["messages"] == [{"role": "user", "content": "Hello"}]
        async with client_of(system, keys["other"]) as client, aiohttp.ClientSession() as http:
            await client.messages.create(**message())
            headers = {"x-api-key": keys["other"]}
            wrong = message(kv_transfer_params={})
            async with http.post(f"http://{system.http}/v1/messages", json=wrong, headers=headers) as refused:
                assert refused.status == 403
                assert (await refused.json())["error"]["type"] == "permission_error"
        assert "cache_salt" not in json.loads(engine.bodies[1])
        with pytest.raises(anthropic.AuthenticationError):
            await client_of(system, "wrong").messages.create(**message())
        await system.until_idle()
