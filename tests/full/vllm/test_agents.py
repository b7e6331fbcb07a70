"""Messages and Responses through the router have the tokens that a real vLLM gives them, for the official clients."""

from __future__ import annotations

import json
import os
import subprocess
from array import array
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.edge.translated_request import TranslatedRequest
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files

from . import conversations
from .engine import BLOCK, MODEL, VllmServer
from .routed import WAYS, Routed, Way, Where, routing

pytestmark = pytest.mark.timeout(900)

COUNT = 200
_LIMIT = 1 << 20
_TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
_FUNCTION = {"type": "function", "name": "look", "description": "Looks.", "parameters": _TOOL["input_schema"]}
_QUESTION = "What is in the cache? " * 8


@pytest.mark.parametrize("way", WAYS)
async def test_the_official_clients(way: Way, where: Where, tmp_path: Path, roomy: VllmServer) -> None:
    await roomy.ready()
    async with routing(way, where, tmp_path, roomy) as routed:
        await _messages(routed, roomy)
        await _responses(routed)


async def _messages(routed: Routed, server: VllmServer) -> None:
    prompt: dict[str, Any] = {
        "model": MODEL,
        "system": "Help.",
        "tools": [_TOOL],
        "messages": [{"role": "user", "content": _QUESTION}],
    }
    async with anthropic.AsyncAnthropic(base_url=routed.http, api_key="none", max_retries=0) as client:
        counted = await client.messages.count_tokens(**prompt)
        assert counted.input_tokens == (await server.post("/v1/messages/count_tokens", prompt))["input_tokens"]
        first = await client.messages.create(**prompt, max_tokens=8)
        assert (first.type, first.role, first.stop_reason) == ("message", "assistant", "max_tokens")
        cached = (counted.input_tokens - 1) // BLOCK * BLOCK
        while True:
            async with client.messages.stream(**prompt, max_tokens=8) as stream:
                kinds = [event.type async for event in stream]
                usage = (await stream.get_final_message()).usage
            assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
            assert usage.output_tokens == 8
            assert prompt_tokens(usage.model_dump()) == counted.input_tokens
            if usage.cache_read_input_tokens == cached:
                return


async def _responses(routed: Routed) -> None:
    prompt: dict[str, Any] = {"model": MODEL, "instructions": "Help.", "input": _QUESTION, "tools": [_FUNCTION]}
    async with openai.AsyncOpenAI(base_url=f"{routed.http}/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(**prompt, max_output_tokens=8, store=False)
        assert (first.object, first.status) == ("response", "incomplete"), first
        assert first.usage
        cached = (first.usage.input_tokens - 1) // BLOCK * BLOCK
        while True:
            stream = await client.responses.create(**prompt, max_output_tokens=8, store=False, stream=True)
            events = [event async for event in stream]
            assert events[0].type == "response.created"
            # vLLM calls a stream complete that it ends at the maximum.
            assert events[-1].type in ("response.incomplete", "response.completed"), events[-1]
            usage = events[-1].response.usage
            assert usage
            assert (usage.input_tokens, usage.output_tokens) == (first.usage.input_tokens, 8)
            if usage.input_tokens_details.cached_tokens == cached:
                return


async def test_messages_have_the_tokens_of_the_engine(
    where: Where, tmp_path: Path, roomy: VllmServer, vllm_python: str
) -> None:
    bodies = [body | {"model": MODEL} for body in conversations.messages(5, COUNT)]
    counts: list[int] = []
    await roomy.ready()
    async with routing("sidecar", where, tmp_path, roomy) as routed:
        ids = token_ids(MessagesRequest, roomy.model, bodies)
        for body, expected in zip(bodies, ids, strict=True):
            count = {name: value for name, value in body.items() if name != "max_tokens"}
            counts.append((await roomy.post("/v1/messages/count_tokens", count))["input_tokens"])
            for _ in range(2):
                answer, predicted = await _post(routed, "/v1/messages", body)
                assert prompt_tokens(answer["usage"]) == len(expected), body
                await routed.until_indexed(expected)
            cached = answer["usage"].get("cache_read_input_tokens") or 0
            assert predicted == cached == (len(expected) - 1) // BLOCK * BLOCK
    assert [len(each) for each in ids] == counts
    chats = [MessagesRequest.engine_chat(json.dumps(body).encode(), late_systems=True) for body in bodies]
    assert ids == await _tokenized(roomy, chats)
    assert ids == _by_transformers(vllm_python, roomy.model, chats)


async def test_responses_have_the_tokens_of_the_engine(
    where: Where, tmp_path: Path, roomy: VllmServer, vllm_python: str
) -> None:
    bodies = [body | {"model": MODEL} for body in conversations.responses(6, COUNT)]
    await roomy.ready()
    async with routing("sidecar", where, tmp_path, roomy) as routed:
        ids = token_ids(ResponsesRequest, roomy.model, bodies)
        for body, expected in zip(bodies, ids, strict=True):
            for _ in range(2):
                answer, predicted = await _post(routed, "/v1/responses", body)
                usage = answer["usage"]
                assert usage["input_tokens"] == len(expected), body
                await routed.until_indexed(expected)
            assert predicted == usage["input_tokens_details"]["cached_tokens"] == (len(expected) - 1) // BLOCK * BLOCK
    chats = [ResponsesRequest.engine_chat(json.dumps(body).encode()) for body in bodies]
    assert ids == await _tokenized(roomy, chats)
    assert ids == _by_transformers(vllm_python, roomy.model, chats)


def token_ids(api: type[TranslatedRequest], model: Path, bodies: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the token ids by which the router routes bodies that it passes on."""
    text = ModelText(read_model_files(model), cache_bytes=1 << 20, engine="vllm")
    found = []
    for body in bodies:
        source = RoutedBody.parse(json.dumps(body).encode(), max_prompt_tokens=_LIMIT, api=api).source
        assert source is not None
        found.append(array("I", completed(source.slices(text, _LIMIT))).tolist())
    return found


async def _post(routed: Routed, path: str, body: dict[str, Any]) -> tuple[Any, int]:
    """Returns the response, and how many tokens the router expected in the cache."""
    async with routed.session.post(routed.http + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, (body, answer)
        assert response.headers["x-kvrouter-routed-on"] == "tokens", body
        return answer, int(response.headers["x-kvrouter-overlap-blocks"]) * BLOCK


def prompt_tokens(usage: dict[str, Any]) -> int:
    """Returns the tokens of the prompt, which Anthropic's usage divides."""
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in parts)


async def _tokenized(server: VllmServer, chats: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the token ids that the server gives to chats."""
    found = []
    for chat in chats:
        kept = _with_texts({name: chat[name] for name in ("model", "messages", "tools") if name in chat})
        for message in kept["messages"]:
            if "reasoning_content" in message:  # The name that chats take as well, but not this page.
                message["reasoning"] = message.pop("reasoning_content")
        found.append((await server.post("/tokenize", kept))["tokens"])
    return found


def _with_texts(chat: dict[str, Any]) -> dict[str, Any]:
    """Returns a chat whose calls have arguments as texts, as engines take them."""
    copy: dict[str, Any] = json.loads(json.dumps(chat))
    for message in copy["messages"]:
        for call in message.get("tool_calls", ()):
            if not isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copy


def _by_transformers(python: str, model: Path, chats: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the token ids that transformers gives to chats."""
    cases = []
    for chat in map(_with_texts, chats):
        for message in chat["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            if isinstance(content := message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in content)
        for tool in chat.get("tools", ()):
            # vLLM's schema has a description, null if there is none.
            function = tool["function"]
            described = {"name": function["name"], "description": function.get("description")}
            tool["function"] = described | function
        kept = {name: chat[name] for name in ("messages", "tools") if name in chat}
        cases.append(kept | {"add_generation_prompt": True})
    script = str(Path(__file__).parents[1] / "text" / "transformers_reference.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    given = json.dumps({"texts": [], "chats": cases}).encode()
    done = subprocess.run(
        (python, script, str(model)), input=given, stdout=subprocess.PIPE, env=environment, check=True
    )
    return [chat.get("ids", chat) for chat in json.loads(done.stdout)["chats"]]
