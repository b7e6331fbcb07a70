"""A chat whose worker is lost anywhere in its output reads as if nothing had happened, across one or two seams."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, TopLogprobs, WorkerServiceGenerateRequest

from ....byte_tokenizer import write_byte_tokenizer
from ....waiting import until
from ..gateway import MODEL, System, running_system

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SEAMS = 5
"""Places in the output of each case at which a worker is lost."""


class Engines:
    """Engines that say the same. The one that begins a request fails after some tokens, the next one later again."""

    def __init__(self) -> None:
        self.says = b""
        self.fails_at: tuple[int, ...] = ()
        """Numbers of output tokens after which the first, second ... attempt fails."""
        self.prompts: list[int] = []
        """Prompt tokens of each attempt of the only request."""

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        prompts = self.prompts
        prompts.append(len(request.token_ids))
        begun = prompts[-1] - prompts[0]
        fails_at = dict(enumerate(self.fails_at, 1)).get(len(prompts))
        assert bytes(request.token_ids[len(request.token_ids) - begun :]) == self.says[:begun]
        ends = min(len(self.says), begun + request.stop_conditions.max_tokens)
        for place in range(begun, ends):
            if place == fails_at:
                raise RuntimeError("the engine is lost")
            output = GenerateOutput(token_ids=self.says[place : place + 1])
            if request.sampling_options.logprobs:
                output.logprobs.append(-place / 8)
                output.top_logprobs.append(TopLogprobs(token_ids=[place], logprobs=[-place / 8]))
            if place == ends - 1:
                whole = ends == len(self.says)
                output.finish_reason = FinishReason.FINISH_REASON_STOP if whole else FinishReason.FINISH_REASON_LENGTH
            yield output

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport(total_blocks=512)}


@pytest.fixture
async def running(
    nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[System, Engines]]:
    directory = write_byte_tokenizer(tmp_path / "model")
    (directory / "output_format.json").write_text('{"reasoning_parser": "qwen3"}')
    settings: dict[str, Any] = {"tokenizers": {MODEL: str(directory)}, "tool_call_parsers": {MODEL: "hermes"}}
    engines = Engines()
    config: dict[str, Any] = {"model": MODEL, "block_size": 16, "ranks": {0: 512}, "max_model_len": 8192}
    config |= {"etcd": etcd_endpoint, "nats": nats_url, "component": ComponentName(namespace, "workers")}
    async with (
        running_system(nats_url, etcd_endpoint, namespace, worker_back_off_failures=1000, **settings) as system,
        AsyncExitStack() as stack,
    ):
        for worker_id in (1, 2):
            worker = await stack.enter_async_context(sdk.running(WorkerConfig(worker_id=worker_id, **config), engines))
            await worker.registered()
            await system.until_candidate(worker_id)
        await until(lambda: system.frontend.models.has_text(MODEL))
        yield system, engines


async def answered(http: aiohttp.ClientSession, url: str, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """Returns all that a client reads of a chat, the same for a stream."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with http.post(url, json=body | fields) as response:
        text = await response.text()
        assert response.status == 200, text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")] if stream else [text]
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": "", "logprobs": [], "end": None, "migrations": 0}
    for each in map(json.loads, lines):
        assert "error" not in each, each
        found["migrations"] = max(found["migrations"], each.get("kvrouter", {}).get("migrations", 0))
        if each.get("usage"):
            found["usage"] = (each["usage"]["prompt_tokens"], each["usage"]["completion_tokens"])
        for choice in each["choices"]:
            part = choice["delta"] if stream else choice["message"]
            found["content"] += part.get("content") or ""
            found["reasoning"] += part.get("reasoning_content") or ""
            for call in part.get("tool_calls") or ():
                found["calls"] += (call["function"].get("name") or "") + call["function"]["arguments"]
            found["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            found["end"] = choice["finish_reason"] or found["end"]
    return found


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "stop string": ("Hello there, STOP now", {"stop": ["STOP"]}, {"content": "Hello there, ", "end": "stop"}),
    "bytes of a character": ("naïve 日本 🙂 end", {}, {"content": "naïve 日本 🙂 end", "end": "stop"}),
    "limit": ("a b c d e f g h", {"max_tokens": 9}, {"content": "a b c d e", "end": "length"}),
    "tool call": ("I look. " + CALL, {"tools": TOOLS}, {"content": "I look. ", "end": "tool_calls"}),
    "reasoning": ("<think>\nfar</think>Rome", {}, {"content": "Rome", "reasoning": "\nfar"}),
    "log probabilities": ("some words", {"logprobs": True, "top_logprobs": 1}, {"content": "some words"}),
}
"""What the engines say, fields of the request, and parts of the response."""


@pytest.mark.full
async def test_a_chat_reads_the_same_wherever_its_workers_are_lost(running: tuple[System, Engines]) -> None:
    system, engines = running
    url = f"http://{system.http}/v1/chat/completions"
    async with aiohttp.ClientSession() as http:
        for (case, (says, fields, expected)), stream in itertools.product(CASES.items(), (False, True)):
            engines.says = says.encode()
            engines.fails_at = ()
            engines.prompts.clear()
            undisturbed = await answered(http, url, stream=stream, **fields)
            assert undisturbed | expected == undisturbed
            assert undisturbed["migrations"] == 0
            generated = undisturbed["usage"][1]
            for seam in range(1, generated, max(1, generated // SEAMS)):
                engines.fails_at = (seam, seam + 2)
                engines.prompts.clear()
                found = await answered(http, url, stream=stream, **fields)
                assert len(engines.prompts) > 1
                assert found.pop("migrations") == len(set(engines.prompts)) - 1, "an attempt with output is a migration"
                assert found | {"migrations": 0} == undisturbed, f"{case}: lost at {engines.fails_at}"
    await system.until_idle()
