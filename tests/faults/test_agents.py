"""Coding agents work over two engines, and one is killed in the middle: the official clients lose no turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer

from .processes import MODEL, Processes, start_system
from .rig import FULL

AGENTS = 16 if FULL else 4
"""Of each API."""
TURNS = 4 if FULL else 3
TOKENS = 120
SCHEMA: Any = {"type": "object", "properties": {"path": {"type": "string"}}}
SYSTEM = "You are a coding agent. " * 40
Report = Callable[[str, object], None]


class Progress:
    """Turns that have ended."""

    def __init__(self) -> None:
        self.ended = 0


async def claude(base_url: str, number: int, progress: Progress) -> None:
    """Works as an agent of Anthropic's Messages: each turn sends the whole conversation."""
    tools: Any = [{"name": "read_file", "description": "Reads.", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": f"Task {number}"}]
    headers = {"x-claude-code-session-id": f"claude-{number}"}
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            fields: dict[str, Any] = {"system": SYSTEM, "tools": tools, "max_tokens": TOKENS}
            async with client.messages.stream(
                model=MODEL, messages=messages, extra_headers=headers, **fields
            ) as stream:
                answer = await stream.get_final_message()
            assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")
            assert answer.content
            assert 0 < answer.usage.output_tokens <= TOKENS
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            calls = [block for block in answer.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"file {turn}"} for call in calls]
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
            progress.ended += 1


async def codex(base_url: str, number: int, progress: Progress) -> None:
    """Works as an agent of OpenAI's Responses."""
    tools: Any = [{"type": "function", "name": "read_file", "description": "Reads.", "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": f"Task {number}"}]
    async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        for turn in range(TURNS):
            stream = await client.responses.create(
                model=MODEL,
                input=items,
                instructions=SYSTEM,
                tools=tools,
                max_output_tokens=TOKENS,
                stream=True,
                extra_headers={"session-id": f"codex-{number}"},
            )
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1]
            assert last.type in ("response.completed", "response.incomplete")
            answer = last.response
            assert answer.status in ("completed", "incomplete")
            assert answer.output
            assert answer.usage is not None
            assert 0 < answer.usage.output_tokens <= TOKENS
            items += [item.to_dict() for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": f"{turn}"} for call in calls]
            items.append({"role": "user", "content": "Go on."})
            progress.ended += 1


@pytest.mark.timeout(300)
async def test_no_turn_of_an_agent_is_lost_with_a_worker(
    processes: Processes, tmp_path: Path, record_property: Report
) -> None:
    write_small_tokenizer(tmp_path)
    port = free_port()
    http = f"127.0.0.1:{port}"
    await start_system(
        processes,
        schedulers=1,
        frontends=1,
        clock_factor=1.0,
        engine=("--vocabulary-size", str(VOCABULARY_SIZE), "--mean-output-tokens", "0"),
        frontend=("--port", str(port), "--tokenizers", f"{MODEL}={tmp_path}", "--worker-probe-seconds", "0.2"),
    )
    progress = Progress()
    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(claude(f"http://{http}", number, progress))
            group.create_task(codex(f"http://{http}", number, progress))
        async with asyncio.timeout(120):
            # Each agent has ended a turn, and the next ones are in the middle.
            while progress.ended < 2 * AGENTS or not (await processes.requests_by_worker("scheduler-0")).get(1):
                await asyncio.sleep(0.01)
        await processes.kill("mocker-0")
    assert progress.ended == 2 * AGENTS * TURNS
    await processes.until_booked("scheduler-0", 0)
    record_property("observed", f"{progress.ended} turns of {2 * AGENTS} agents, all complete")
