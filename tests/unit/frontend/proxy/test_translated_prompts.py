"""A prompt of Messages or Responses has the same tokens over tokens, passed on to an engine, and as a chat."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings, strategies as st
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.edge.translated_request import TranslatedRequest
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from kvrouter.net.model_files import read_model_files

LIMIT = 100_000
WORDS = st.text(alphabet="abc é\n日", min_size=1, max_size=20).filter(str.strip)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TURN = st.tuples(WORDS, WORDS, st.dictionaries(st.sampled_from("ab"), WORDS, max_size=2), WORDS, st.booleans())
"""What the user says, what the model thinks and says, the arguments of its call, and whether there is one."""


@cache
def text() -> ModelText:
    with TemporaryDirectory() as directory:
        write_small_tokenizer(Path(directory))
        return ModelText(read_model_files(Path(directory)), cache_bytes=1 << 20, engine="vllm")


def tokens(source: PromptSource | None) -> bytes:
    assert source is not None
    slices = source.slices(text(), LIMIT)
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            return bytes(ended.value)


def check(api: type[TranslatedRequest], body: dict[str, Any], chat: dict[str, Any]) -> None:
    encoded = json.dumps(body).encode()
    passed = RoutedBody.parse(encoded, max_prompt_tokens=LIMIT, api=api)
    over_tokens = api.read(encoded)
    routed, _, sent = passed.as_chat(encoded, api=api, max_prompt_tokens=LIMIT)
    as_chat = RoutedBody.parse(sent, max_prompt_tokens=LIMIT)
    assert routed.token_ids == as_chat.token_ids
    (expected,) = parse_chat(json.dumps(chat).encode()).prompts
    (prompt,) = over_tokens.to_text_request(len(encoded)).prompts
    assert tokens(passed.source) == tokens(prompt) == tokens(as_chat.source) == tokens(expected)
    assert tokens(routed.source) == tokens(expected)


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(TURN, max_size=4), WORDS)
def test_messages(system: str, turns: list[Any], last: str) -> None:
    messages: list[Any] = []
    chat: list[Any] = [{"role": "system", "content": system}]
    for number, (said, thought, arguments, answer, calls) in enumerate(turns):
        messages.append({"role": "user", "content": [{"type": "text", "text": said}]})
        chat.append({"role": "user", "content": said})
        blocks: list[Any] = [
            {"type": "thinking", "thinking": thought, "signature": ""},
            {"type": "text", "text": answer},
        ]
        spoken: dict[str, Any] = {"role": "assistant", "content": answer, "reasoning_content": thought}
        messages.append({"role": "assistant", "content": blocks})
        chat.append(spoken)
        if calls:
            call_id = f"call{number:05}"
            blocks.append({"type": "tool_use", "id": call_id, "name": "look", "input": arguments})
            function = {"name": "look", "arguments": json.dumps(arguments)}
            spoken["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": said}]}
            )
            chat.append({"role": "tool", "tool_call_id": call_id, "content": said})
    messages.append({"role": "user", "content": last})
    chat.append({"role": "user", "content": last})
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    function = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    check(
        MessagesRequest,
        {"model": "m", "max_tokens": 5, "system": system, "messages": messages, "tools": [tool]},
        {"model": "m", "messages": chat, "tools": [{"type": "function", "function": function}]},
    )


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(TURN, max_size=4), WORDS)
def test_responses(system: str, turns: list[Any], last: str) -> None:
    items: list[Any] = []
    chat: list[Any] = [{"role": "system", "content": system}]
    for number, (said, thought, arguments, answer, calls) in enumerate(turns):
        items.append({"role": "user", "content": [{"type": "input_text", "text": said}]})
        chat.append({"role": "user", "content": said})
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": answer}]})
        spoken: dict[str, Any] = {"role": "assistant", "content": answer, "reasoning_content": thought}
        chat.append(spoken)
        if calls:
            call_id = f"call{number:05}"
            function = {"name": "look", "arguments": json.dumps(arguments)}
            items.append({"type": "function_call", "call_id": call_id} | function)
            items.append({"type": "function_call_output", "call_id": call_id, "output": said})
            spoken["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
            chat.append({"role": "tool", "tool_call_id": call_id, "content": said})
    items.append({"role": "user", "content": last})
    chat.append({"role": "user", "content": last})
    tool = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
    check(
        ResponsesRequest,
        {"model": "m", "instructions": system, "input": items, "tools": [{"type": "function"} | tool]},
        {"model": "m", "messages": chat, "tools": [{"type": "function", "function": tool}]},
    )
