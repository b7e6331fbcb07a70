"""Tool calls in the output of workers that receive tokens, as the official client of the OpenAI API sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateRequest
from tokenizers import Tokenizer

from ..gateway import MODEL, System, running_system, until

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("weather", "news")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Rome"}}\n</tool_call>\n'
NAMED: Any = {"type": "function", "function": {"name": "news"}}


class Engine:
    """An engine that constrains outputs, and says what it is told to say."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.says = ""
        self.schema: Any = None
        self._tokenizer = tokenizer

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        schema = request.sampling_options.structured_output.json_schema
        self.schema = json.loads(schema) if schema else None
        *tokens, last = self._tokenizer.encode(self.says).ids
        for token in tokens:
            yield GenerateOutput(token_ids=[token])
        yield GenerateOutput(token_ids=[last], finish_reason=FinishReason.FINISH_REASON_STOP)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport(total_blocks=512)}


@pytest.fixture
async def running(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[System, Engine]]:
    write_small_tokenizer(tmp_path)
    engine = Engine(Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    (tmp_path / "output_format.json").write_text('{"reasoning_parser": "qwen3"}')
    settings: dict[str, Any] = {"tokenizers": {MODEL: str(tmp_path)}, "tool_call_parsers": {MODEL: "hermes"}}
    config = WorkerConfig(
        component=ComponentName(namespace, "workers"),
        model=MODEL,
        block_size=16,
        worker_id=2,
        ranks={0: 512},
        etcd=etcd_endpoint,
        nats=nats_url,
        max_model_len=8192,
        structured_output=True,
    )
    async with running_system(nats_url, etcd_endpoint, namespace, **settings) as system, AsyncExitStack() as stack:
        worker = await stack.enter_async_context(sdk.running(config, engine))
        await worker.registered()
        await system.until_candidate(2)
        await until(lambda: system.frontend.models.has_text(MODEL))
        yield system, engine


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


async def test_the_client_gets_the_calls_of_an_output(running: tuple[System, Engine]) -> None:
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


async def test_the_client_gets_the_reasoning_apart_from_the_answer(running: tuple[System, Engine]) -> None:
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
