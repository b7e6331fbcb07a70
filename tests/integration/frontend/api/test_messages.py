"""Anthropic's Messages over workers that receive tokens, as the official client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest

from ..gateway import MODEL, System
from .speaking import SpeakingEngine, speaking_system

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": name, "description": "Look.", "input_schema": SCHEMA} for name in ("weather", "news")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>\n'
ROME = {"city": "Rome"}


@pytest.fixture
async def running(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[System, SpeakingEngine]]:
    async with speaking_system(nats_url, etcd_endpoint, namespace, tmp_path) as system:
        yield system


@pytest.fixture
async def client(running: tuple[System, SpeakingEngine]) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=f"http://{running[0].http}", api_key="none", max_retries=0) as made:
        yield made


def message(**fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100} | fields


async def created(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.types.Message:
    """Returns the message, which is the same streamed."""
    whole: anthropic.types.Message = await client.messages.create(**message(**fields))
    async with client.messages.stream(**message(**fields)) as stream:
        events = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == len(whole.content)
    shown, other = whole.model_dump(), streamed.model_dump()
    for block in (*shown["content"], *other["content"]):
        block.pop("id", None)
        block.pop("signature", None)
        block.pop("parsed_output", None)
    for name in ("content", "stop_reason", "stop_sequence", "role", "type", "model"):
        assert other[name] == shown[name], name
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


async def test_the_client_gets_text_thinking_and_tool_calls(
    running: tuple[System, SpeakingEngine], client: anthropic.AsyncAnthropic
) -> None:
    system, engine = running
    engine.says = "Just text."
    answer = await created(client)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Just text."}]
    assert answer.id.startswith("msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens > 0
    assert answer.usage.cache_read_input_tokens == 0
    engine.says = "<think>\nRome is far.</think>I look. " + CALL % "weather" + CALL % "news"
    answer = await created(client, tools=TOOLS)
    thinking, text, *calls = answer.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "\nRome is far."
    assert thinking.signature
    assert text.type == "text"
    assert text.text == "I look. "
    assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [("weather", ROME), ("news", ROME)]
    assert answer.stop_reason == "tool_use"
    single = await created(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in single.content] == ["thinking", "text", "tool_use"]
    engine.says = "one two three"
    answer = await created(client, stop_sequences=["three", "never"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "three")
    engine.says = '{"city": "Rome"}'
    answer = await created(client, tools=TOOLS, tool_choice={"type": "tool", "name": "news"})
    assert [(call.name, call.input) for call in answer.content if call.type == "tool_use"] == [("news", ROME)]
    assert answer.stop_reason == "tool_use"
    assert engine.schema == SCHEMA
    answer = await created(client, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert engine.schema == SCHEMA
    await system.until_idle()


async def test_an_agent_sends_its_whole_conversation_back(
    running: tuple[System, SpeakingEngine], client: anthropic.AsyncAnthropic
) -> None:
    system, engine = running
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]}]
    fields = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": TOOLS,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    counts = []
    for turn in range(3):
        counted = await client.messages.count_tokens(
            model=MODEL, messages=messages, **{name: fields[name] for name in ("system", "tools", "thinking")}
        )
        engine.says = f"<think>Turn {turn}.</think>" + CALL % "weather"
        answer = await created(client, messages=messages, **fields)
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        counts.append(counted.input_tokens)
        calls = [block for block in answer.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": answer.content})
        result = {
            "type": "tool_result",
            "tool_use_id": calls[0].id,
            "content": [{"type": "text", "text": "Sunny."}],
            "cache_control": {"type": "ephemeral"},
        }
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "And tomorrow?"}]})
        messages.append({"role": "system", "content": "Be brief."})
    assert counts == sorted(set(counts))
    await system.until_idle()


async def test_errors_have_the_form_of_the_api(
    running: tuple[System, SpeakingEngine], client: anthropic.AsyncAnthropic
) -> None:
    system, _ = running
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(**message(model="none"))
    assert unknown.value.body["type"] == "error"  # type: ignore[index]
    assert unknown.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 0}, "max_tokens"),
        ({"nonsense": 1}, "nonsense"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"messages": []}, "messages"),
        ({"messages": [], "system": "Help."}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"tools": [{"type": "web_search_20260318", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"stop_sequences": [""]}, "stop"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
    ]
    async with aiohttp.ClientSession() as session:
        for fields, named in wrong:
            async with session.post(f"http://{system.http}/v1/messages", json=message(**fields)) as answer:
                body = await answer.json()
                assert answer.status == 400, fields
                assert body["error"]["type"] == "invalid_request_error"
                assert body["error"]["message"].startswith(named), body
                assert body["request_id"] == answer.headers["x-request-id"]
        async with session.post(f"http://{system.http}/v1/messages", data=b"{") as answer:
            assert answer.status == 400
            assert json.loads(await answer.text())["type"] == "error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        await client.messages.create(**message(messages=[{"role": "user", "content": [image]}]))
    await system.until_idle()
