"""What routing reads of a body that an engine parses itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.frontend.edge import chat_prompt
from kvrouter.frontend.edge.chat_prompt import ChatPrompt
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.client_work import ClientWork, completed
from kvrouter.frontend.text.model_text import ModelText, PromptSource
from prometheus_client import CollectorRegistry

LIMIT = 10_000
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is an émigré? " * 20}]
CHAT = {"model": "m", "messages": MESSAGES}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}

RENDERED = ("tools", "reasoning_effort", "documents", "add_generation_prompt", "continue_final_message")
"""Fields that both take."""


class Texts:
    """The loaded tokenizers: one model's."""

    def __init__(self, text: ModelText) -> None:
        self._text = text

    def find(self, model: str) -> ModelText | None:
        return self._text if model == "m" else None

    def vocabulary_size(self, model: str) -> int:
        return self._text.tokenizer.vocabulary_size if model == "m" else 0

    async def tokens(self, text: ModelText, prompts: Sequence[PromptSource], limit: int, *, salt: str) -> list[bytes]:
        return [completed(prompt.slices(text, limit)) for prompt in prompts]


async def read(model: ModelText, body: dict[str, Any], served: str = "m") -> RoutedBody:
    parsed = await RoutedBody.read(json.dumps(body).encode(), ClientWork(CollectorRegistry()), max_prompt_tokens=LIMIT)
    texts: Any = Texts(model)
    await parsed.tokenize(texts, served, max_prompt_tokens=LIMIT)
    return parsed


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"response_format": {"type": "json_object"}, "top_logprobs": 3, "logprobs": True, "field_of_the_engine": {}},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
        {"max_tokens": "7", "stream": True, "reasoning_effort": "low"},
        {"documents": [{"title": "t", "text": "x"}], "add_generation_prompt": False},
        {"continue_final_message": True},
    ],
)
async def test_a_chat_has_the_tokens_that_the_api_renders_whatever_else_the_engine_gets(
    model: ModelText, further: dict[str, Any]
) -> None:
    rendered = {key: value for key, value in further.items() if key in RENDERED}
    expected = completed(parse_chat(json.dumps(CHAT | rendered).encode()).prompts[0].slices(model, LIMIT))
    routed = await read(model, CHAT | further)
    assert routed.is_tokenized
    assert routed.token_ids == expected


@pytest.mark.parametrize("prompt", ["one two three", ["one two three", "four"]])
async def test_a_text_is_tokenized_and_of_a_list_the_first(model: ModelText, prompt: Any) -> None:
    routed = await read(model, {"model": "m", "prompt": prompt, "guided_regex": "a*"})
    assert routed.is_tokenized
    assert routed.token_ids == model.tokenizer.encode_whole("one two three")


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"chat_template": "{{ messages }}"},
        CHAT | {"continue_final_message": True, "add_generation_prompt": True},
        CHAT | {"add_special_tokens": True},
        CHAT | {"messages": [{"role": "user", "content": [IMAGE]}]},
        CHAT | {"messages": []},
        {"model": "m", "prompt": "x", "truncate_prompt_tokens": 3},
        {"model": "m", "prompt": {"an": "object"}},
        {"model": "m", "prompt": "word " * 2 * LIMIT},
        {"model": "m", "prompt": ["x" * 20, 5, None]},
        {"model": "m"},
    ],
)
async def test_what_only_the_engine_can_render_is_not_tokenized(model: ModelText, body: dict[str, Any]) -> None:
    routed = await read(model, body)
    assert not routed.is_tokenized
    assert 1 <= routed.prompt_tokens <= LIMIT


async def test_without_a_tokenizer_nothing_is_tokenized(model: ModelText) -> None:
    assert not (await read(model, CHAT, served="another")).is_tokenized


async def test_token_ids_need_no_tokenizer(model: ModelText) -> None:
    routed = await read(model, {"model": "m", "prompt": [1, 2, 3]}, served="another")
    assert routed.is_tokenized
    assert routed.token_ids == bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])


FORM = (
    b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n'
    b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--x--\r\n'
)


@pytest.mark.parametrize("sound", [b"short", b"\xff" * 200_000])
async def test_of_a_body_that_is_not_json_only_the_model_is_read(sound: bytes) -> None:
    work = ClientWork(CollectorRegistry())
    routed = await RoutedBody.read(FORM % sound, work, max_prompt_tokens=LIMIT, is_json=False)
    assert (routed.model, routed.is_tokenized, routed.prompt_tokens) == ("whisper", False, 256)
    assert not (await RoutedBody.read(sound, work, max_prompt_tokens=LIMIT, is_json=False)).model


async def test_an_image_does_not_count_as_a_long_text(model: ModelText) -> None:
    parts = [IMAGE, {"type": "text", "text": "What is this?"}]
    routed = await read(model, CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert 256 <= routed.prompt_tokens < 512


@pytest.mark.parametrize(
    ("fields", "sequences"), [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"n": 0}, 1), ({"n": 1 << 70}, 128)]
)
def test_the_sequences_of_a_prompt_are_known(fields: dict[str, Any], sequences: int) -> None:
    body = json.dumps({"model": "m", "prompt": [1, 2], **fields}).encode()
    assert RoutedBody.parse(body, max_prompt_tokens=LIMIT).sequences == sequences


def source_of(messages: list[dict[str, Any]], **fields: Any) -> PromptSource:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    source = RoutedBody.parse(body, max_prompt_tokens=LIMIT).source
    assert source is not None
    return source


@pytest.fixture
def quick(model: ModelText, monkeypatch: pytest.MonkeyPatch) -> ModelText:
    """A model whose chats take no time."""
    monkeypatch.setattr(model.template, "_left_to_threads", 0)
    monkeypatch.setattr(model.template, "_left_next", 100)
    monkeypatch.setattr(chat_prompt, "time", SimpleNamespace(thread_time=lambda: 0.0))
    return model


def test_a_short_chat_that_is_known_is_tokenized_on_the_event_loop(quick: ModelText) -> None:
    for messages in (MESSAGES, [*MESSAGES, {"role": "assistant", "content": "A"}, MESSAGES[1]]):
        tokens = completed(source_of(messages).slices(quick, LIMIT))
        assert source_of(messages).tokens_at_once(quick, LIMIT) == tokens
    many = MESSAGES[:1] * 400
    completed(source_of(many).slices(quick, LIMIT))
    with_image = [{"role": "user", "content": [{"type": "text", "text": "a"}, {**IMAGE, "image_url": {"url": "x"}}]}]
    for messages in (many, with_image, [{"role": "user", "content": "x y " * 20_000}]):
        assert source_of(messages).tokens_at_once(quick, LIMIT) is None


def test_a_chat_with_many_items_is_not_processed_on_the_event_loop(quick: ModelText) -> None:
    def at_once(arguments: str, **fields: Any) -> bytes | None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        completed(source_of([*MESSAGES, called], **fields).slices(quick, LIMIT))
        return source_of([*MESSAGES, called], **fields).tokens_at_once(quick, LIMIT)

    numbers = json.dumps([0] * 1_000)
    assert at_once("[0]") is not None
    assert at_once(numbers) is None
    assert at_once(r'["\u002c"]') is not None
    assert at_once("[0]", chat_template_kwargs={"x": [0] * 1_000}) is None
    parsed = ChatPrompt([{**MESSAGES[0], "x": [0] * 1_000}], characters=10)
    assert parsed.tokens_at_once(quick, LIMIT) is None


def test_a_chat_that_takes_long_leaves_the_next_ones_to_threads(
    quick: ModelText, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed(source_of(MESSAGES).slices(quick, LIMIT))
    times = iter([0.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(chat_prompt, "time", SimpleNamespace(thread_time=lambda: next(times)))
    found = [source_of(MESSAGES).tokens_at_once(quick, LIMIT) for _ in range(102)]
    assert [number for number, tokens in enumerate(found) if tokens is not None] == [0, 101]
