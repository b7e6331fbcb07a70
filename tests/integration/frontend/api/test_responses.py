"""OpenAI's Responses over workers that receive tokens and over engines, as the official client sees them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from openai.types.responses import Response

from ....waiting import until
from ..gateway import MODEL, System, running_system
from .speaking import SpeakingEngine, speaking_system
from .test_forwarded_messages import break_off, stream_chat
from .test_forwarding import start_engine

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in ("weather", "news")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>\n'


@pytest.fixture
async def running(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[System, SpeakingEngine]]:
    async with speaking_system(nats_url, etcd_endpoint, namespace, tmp_path) as system:
        yield system


def client_of(system: System) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0)


def shown(response: Response) -> dict[str, Any]:
    """Returns the parts of a response that do not differ between two of the same output."""
    body = response.model_dump()
    for item in body["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return {name: body[name] for name in ("output", "status", "incomplete_details", "model", "tools", "usage", "store")}


async def created(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """Returns the response, which is the same streamed: its deltas, its last event, and what the client collects."""
    body: Any = {"model": MODEL, "input": "Hello"} | fields
    whole: Response = await client.responses.create(**body)
    events = [event async for event in await client.responses.create(**body, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == f"response.{whole.status}"
    assert shown(last.response) == shown(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.response.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    async with client.responses.stream(**body) as stream:
        assert shown(await stream.get_final_response()) == shown(whole)
    return whole


async def test_the_client_gets_text_reasoning_and_calls(running: tuple[System, SpeakingEngine]) -> None:
    system, engine = running
    async with client_of(system) as client:
        engine.says = "Just text."
        answer = await created(client, instructions="Help.", temperature=0.5, metadata={"a": "b"})
        assert answer.output_text == "Just text."
        assert answer.id.startswith("resp_")
        assert (answer.status, answer.instructions, answer.metadata) == ("completed", "Help.", {"a": "b"})
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        engine.says = "<think>\nRome is far.</think>I look. " + CALL % "weather" + CALL % "news"
        answer = await created(client, tools=TOOLS, include=["reasoning.encrypted_content"], store=False)
        reasoning, message, *calls = answer.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content or ()] == ["\nRome is far."]
        assert message.type == "message"
        assert answer.output_text == "I look. "
        found = [(call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"]
        assert found == [("weather", {"city": "Rome"}), ("news", {"city": "Rome"})]
        assert answer.usage is not None
        assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
        engine.says = '{"city": "Rome"}'
        await created(client, tools=TOOLS, tool_choice={"type": "function", "name": "news"})
        assert engine.schema == SCHEMA
        form: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
        assert (await created(client, text=form)).output_text == engine.says
        assert engine.schema == SCHEMA
    await system.until_idle()


async def test_an_agent_sends_its_whole_conversation_back(running: tuple[System, SpeakingEngine]) -> None:
    system, engine = running
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "What is the weather?"}]},
    ]
    sizes = []
    async with client_of(system) as client:
        for turn in range(3):
            engine.says = f"<think>Turn {turn}.</think>I look. " + CALL % "weather"
            answer = await created(client, input=items, tools=TOOLS, instructions="Help.", parallel_tool_calls=False)
            assert answer.usage is not None
            sizes.append(answer.usage.input_tokens)
            items += [item.to_dict() for item in answer.output]
            (call,) = [item for item in answer.output if item.type == "function_call"]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."})
    assert sizes == sorted(set(sizes))
    await system.until_idle()


async def test_what_no_chat_expresses_is_refused_by_name(running: tuple[System, SpeakingEngine]) -> None:
    system, _ = running
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": "", "instructions": "Help."}, "input"),
    ]
    async with client_of(system) as client:
        for fields, name in wrong:
            body: Any = {"model": MODEL, "input": "Hello"} | fields
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model=MODEL, extra_body=body)
            assert refused.value.param == name, fields
    await system.until_idle()


async def test_an_engine_gets_them_unchanged_or_as_a_chat(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack, tmp_path: Path
) -> None:
    write_small_tokenizer(tmp_path)
    tokenizers = {MODEL: str(tmp_path)}
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers=tokenizers) as system:
        engine = await start_engine(system, stack, 1, engine="vllm")
        await until(lambda: system.frontend.models.has_text(MODEL))
        url = f"http://{system.http}/v1/responses"
        body = json.dumps({"model": MODEL, "input": "Hello", "field_of_the_engine": 1}, indent=3).encode()
        async with aiohttp.ClientSession() as http:
            async with http.post(url, data=body) as response:
                assert response.status == 200
                assert response.headers["x-kvrouter-routed-on"] == "tokens"
            async with http.post(url, json={"model": MODEL, "input": "x", "store": True}) as response:
                assert response.status == 400
                assert (await response.json())["error"]["param"] == "store"
        assert engine.bodies == [body]
        await system.until_idle()


async def test_a_chat_of_an_engine_is_translated_as_it_arrives(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system, client_of(system) as client:
        engine = await start_engine(system, stack, 1)
        engine.respond = stream_chat
        answer = await created(client, tools=TOOLS)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 4
        engine.respond = break_off
        async with asyncio.timeout(30):
            stream = await client.responses.create(model=MODEL, input="Hello", stream=True)
            events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert events[-1].response.error is not None
        await system.until_idle()
