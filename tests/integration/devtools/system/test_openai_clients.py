"""What the guide of the OpenAI API shows, with the official client on a system as ``make up`` starts it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest
from kvrouter.devtools.system.stack import StackOptions, running_stack
from pydantic import BaseModel

MODEL = "mock-model"


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "get_news", "parameters": {"type": "object", "properties": {}}}},
]


class Event(BaseModel):
    name: str
    day: int
    guests: list[str]


def chat(text: str = "Hello", **fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | fields


@pytest.mark.full
async def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    options = StackOptions(tmp_path, tmp_path, workers=2, has_text=True, clock=20, mean_output_tokens=20)
    async with (
        running_stack(options) as stack,
        openai.AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client,
    ):
        await _chats_without_max_tokens_end(client)
        await _outputs_keep_their_constraints(client)
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            await _a_forced_call_is_found(client, choice)
        await _a_call_is_made_when_the_user_asks_for_it(client)
        await _reasoning_is_separated(client)


async def _chats_without_max_tokens_end(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**chat())
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens < 1000
    chunks = [chunk async for chunk in await client.chat.completions.create(**chat(), stream=True)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    exact = await client.chat.completions.create(**chat(max_tokens=200, extra_body={"ignore_eos": True}))
    assert exact.usage is not None
    assert (exact.choices[0].finish_reason, exact.usage.completion_tokens) == ("length", 200)


async def _outputs_keep_their_constraints(client: openai.AsyncOpenAI) -> None:
    parsed = await client.chat.completions.parse(**chat("A birthday"), response_format=Event)
    assert isinstance(parsed.choices[0].message.parsed, Event)
    assert parsed.choices[0].finish_reason == "stop"
    again = await client.chat.completions.parse(**chat("A birthday", seed=5), response_format=Event)
    same = await client.chat.completions.parse(**chat("A birthday", seed=5), response_format=Event)
    assert again.choices[0].message.parsed == same.choices[0].message.parsed
    answer = await client.chat.completions.create(**chat("JSON"), response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
    for extra, allowed in (
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ):
        answer = await client.chat.completions.create(**chat("Which?", extra_body=extra))
        assert re.fullmatch(allowed, answer.choices[0].message.content or "")
    with pytest.raises(openai.BadRequestError, match="does not know not in a JSON schema") as refused:
        await client.chat.completions.create(
            **chat(), response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        )
    assert refused.value.param == "response_format"


async def _a_forced_call_is_found(client: openai.AsyncOpenAI, choice: Any) -> None:
    fields = chat("Hello", tools=TOOLS[:1], tool_choice=choice, seed=3)
    (whole,) = (await client.chat.completions.create(**fields)).choices
    (call,) = (whole.message.tool_calls or [])[:1]
    _check_call(call)
    async with client.chat.completions.stream(**fields) as stream:
        (streamed,) = (await stream.get_final_completion()).choices
    assert [each.function.arguments for each in streamed.message.tool_calls or []] == [
        each.function.arguments for each in whole.message.tool_calls or [] if each.type == "function"
    ]


async def _a_call_is_made_when_the_user_asks_for_it(client: openai.AsyncOpenAI) -> None:
    question = "What is the weather in Paris?"
    (asked,) = (await client.chat.completions.create(**chat(question, tools=TOOLS))).choices
    assert asked.finish_reason == "tool_calls"
    (call,) = asked.message.tool_calls or []
    _check_call(call)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}
    messages: Any = [{"role": "user", "content": question}, asked.message.model_dump(exclude_none=True), result]
    (answered,) = (await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)).choices
    assert (answered.finish_reason, answered.message.tool_calls) == ("stop", None)
    for other in (chat("Tell me a story", tools=TOOLS), chat(question, tools=TOOLS, tool_choice="none")):
        (choice,) = (await client.chat.completions.create(**other)).choices
        assert not choice.message.tool_calls


async def _reasoning_is_separated(client: openai.AsyncOpenAI) -> None:
    for wanted in ({"reasoning_effort": "low"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}):
        (choice,) = (await client.chat.completions.create(**chat(**wanted))).choices
        message: Any = choice.message
        assert message.reasoning_content.strip()
        assert message.content.strip()
        assert "think>" not in message.content + message.reasoning_content
        assert choice.finish_reason == "stop"
    (plain,) = (await client.chat.completions.create(**chat())).choices
    assert not getattr(plain.message, "reasoning_content", None)


def _check_call(call: Any) -> None:
    assert call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"city", "unit"}
    assert arguments["unit"] in ("celsius", "fahrenheit")
