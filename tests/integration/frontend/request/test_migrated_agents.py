"""A turn of a coding agent whose worker is lost anywhere in its output reads as if nothing had happened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from ..gateway import MODEL, System
from .test_migrated_texts import CALL, SEAMS, Engines, running

SAYS = "<think>\nfar</think>I look. " + CALL + CALL
SCHEMA: Any = {"type": "object"}

__all__ = ["running"]


async def message(system: System) -> dict[str, Any]:
    """Returns what Anthropic's client reads of a stream."""
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    messages: Any = [{"role": "user", "content": "Hello"}]
    async with (
        anthropic.AsyncAnthropic(base_url=f"http://{system.http}", api_key="none", max_retries=0) as client,
        client.messages.stream(model=MODEL, max_tokens=400, messages=messages, tools=tools) as stream,
    ):
        found = (await stream.get_final_message()).model_dump(exclude={"id"})
    for block in found["content"]:
        block.pop("id", None)
        block.pop("signature", None)
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["stop_reason"] == "tool_use"
    return found


async def response(system: System) -> dict[str, Any]:
    """Returns what OpenAI's client reads of a stream."""
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    async with (
        openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model=MODEL, input="Hello", tools=tools) as stream,
    ):
        found = (await stream.get_final_response()).model_dump(exclude={"id", "created_at"})
    for item in found["output"]:
        item.pop("id", None)
        item.pop("call_id", None)
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert found["status"] == "completed"
    return found


@pytest.mark.parametrize("read", [message, pytest.param(response, marks=pytest.mark.full)])
async def test_a_turn_reads_the_same_wherever_its_workers_are_lost(
    running: tuple[System, Engines], read: Callable[[System], Awaitable[dict[str, Any]]]
) -> None:
    system, engines = running
    engines.says = SAYS.encode()
    undisturbed = await read(system)
    for seam in range(1, len(engines.says), len(engines.says) // (2 * SEAMS)):
        engines.fails_at = (seam, seam + 2)
        engines.prompts.clear()
        assert await read(system) == undisturbed, f"lost at {engines.fails_at}"
        assert len(engines.prompts) > 1
    await system.until_idle()
