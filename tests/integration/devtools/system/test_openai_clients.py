"""What the guide of the OpenAI API shows, with the official client on a system as ``make up`` starts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
from kvrouter.devtools.system.stack import StackOptions, running_stack

MODEL = "mock-model"


def chat(text: str = "Hello", **fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}]} | fields


async def test_the_examples_of_the_guide_run(tmp_path: Path) -> None:
    options = StackOptions(tmp_path, tmp_path, workers=2, has_text=True, clock=20, mean_output_tokens=20)
    async with (
        running_stack(options) as stack,
        openai.AsyncOpenAI(base_url=f"http://{stack.http}/v1", api_key="none", max_retries=0) as client,
    ):
        await _chats_without_max_tokens_end(client)


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
