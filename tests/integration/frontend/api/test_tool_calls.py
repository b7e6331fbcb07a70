"""Tool calls in the output of workers that receive tokens, as the official client of the OpenAI API sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ..gateway import MODEL, System
from .speaking import SpeakingEngine, speaking_system

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "news")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>\n'
NAMED: Any = {"type": "function", "function": {"name": "news"}}


@pytest.fixture
async def running(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[System, SpeakingEngine]]:
    async with speaking_system(nats_url, etcd_endpoint, namespace, tmp_path) as system:
        yield system


def chat(**fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100} | fields


async def called(client: openai.AsyncOpenAI, **fields: Any) -> tuple[Any, Any, list[tuple[str, Any]]]:
    """Returns reason of the end, content and calls, which are the same streamed."""
    (choice,) = (await client.chat.completions.create(**chat(**fields))).choices
    calls = choice.message.tool_calls or []
    chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**chat(**fields), stream=True)]
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    begun = [part for part in parts if part.id]
    assert [part.index for part in begun] == list(range(len(calls)))
    assert [part.function.name for part in begun] == [call.function.name for call in calls]
    assert len({part.id for part in begun}) == len(calls)
    assert len(parts) >= 2 * len(calls), "the arguments arrive in pieces"
    for index, call in enumerate(calls):
        pieces = [part.function.arguments for part in parts if part.index == index]
        assert "".join(pieces) == call.function.arguments
    found = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice.message.content or "")
    assert chunks[-1].finish_reason == choice.finish_reason
    return choice.finish_reason, choice.message.content, found


async def test_the_client_gets_the_calls_of_an_output(running: tuple[System, SpeakingEngine]) -> None:
    system, engine = running
    rome = {"city": "Rome"}
    async with openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as client:
        engine.says = "I look. " + CALL % "weather" + CALL % "news"
        both = [("weather", rome), ("news", rome)]
        assert await called(client, tools=TOOLS) == ("tool_calls", "I look. ", both)
        async with client.chat.completions.stream(**chat(tools=TOOLS)) as stream:
            (choice,) = (await stream.get_final_completion()).choices
        found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
        assert found == both
        assert await called(client, tools=TOOLS, parallel_tool_calls=False) == ("tool_calls", "I look. ", both[:1])
        assert await called(client, tools=TOOLS, tool_choice="none") == ("stop", engine.says, [])
        assert await called(client) == ("stop", engine.says, [])
        engine.says = "No call <tool_call> at all"
        assert await called(client, tools=TOOLS) == ("stop", engine.says, [])
        assert engine.schema is None
        engine.says = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
        assert await called(client, tools=TOOLS, tool_choice="required") == ("tool_calls", None, both[:1])
        assert [each["properties"]["name"] for each in engine.schema["items"]["anyOf"]] == [
            {"const": "weather"},
            {"const": "news"},
        ]
        engine.says = '{"city": "Rome"}'
        assert await called(client, tools=TOOLS, tool_choice=NAMED) == ("stop", None, both[1:])
        assert engine.schema == SCHEMA
        for choice in ("any", "required", {"type": "function", "function": {"name": "x"}}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(
                    **chat(tools=[] if choice == "required" else TOOLS, tool_choice=choice)
                )
            assert caught.value.param == "tool_choice"
    await system.until_idle()


async def test_the_client_gets_the_reasoning_apart_from_the_answer(running: tuple[System, SpeakingEngine]) -> None:
    system, engine = running
    engine.says = "<think>\nRome is far.</think>Far. " + CALL % "weather"
    async with openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as client:

        async def answered(**fields: Any) -> tuple[str | None, str | None, int]:
            """Returns reasoning, content and number of calls, which are the same streamed."""
            (choice,) = (await client.chat.completions.create(**chat(tools=TOOLS, **fields))).choices
            reasoning = (choice.message.model_extra or {}).get("reasoning_content")
            stream = await client.chat.completions.create(**chat(tools=TOOLS, **fields), stream=True)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            pieces = [(delta.model_extra or {}).get("reasoning_content") for delta in deltas]
            assert "".join(filter(None, pieces)) == (reasoning or "")
            assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
            return reasoning, choice.message.content, len(choice.message.tool_calls or [])

        assert await answered() == ("\nRome is far.", "Far. ", 1)
        assert await answered(extra_body={"include_reasoning": False}) == (None, "Far. ", 1)
        assert await answered(stop="far") == ("\nRome is ", None, 0)
        engine.says = '[{"name": "weather", "parameters": {"city": "<think>"}}]'
        assert await answered(tool_choice="required") == (None, None, 1)
    await system.until_idle()
