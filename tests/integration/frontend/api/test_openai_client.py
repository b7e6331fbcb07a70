"""The official client of the OpenAI API against a whole system with a tokenizer: chats, completions, models, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer

from ....waiting import until
from ..gateway import MODEL, System, running_system


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_small_tokenizer(directory)
    return directory


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, directory: Path) -> AsyncIterator[System]:
    tokenizers = {MODEL: str(directory)}
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers=tokenizers) as running:
        await running.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
        await until(lambda: running.frontend.models.has_text(MODEL))
        yield running


@pytest.fixture
async def client(system: System) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://{system.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(**fields: Any) -> Any:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8} | fields


async def test_a_chat_is_answered_with_text(system: System, client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(**chat(), extra_headers={"x-request-id": "mine"})
    answer = raw.parse()
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens > 6
    assert answer.usage.prompt_tokens_details is not None
    assert raw.headers["x-request-id"] == "mine"
    assert raw.headers["x-kvrouter-worker"] == "1:0"
    await system.until_idle()


async def test_a_streamed_chat_has_the_text_of_a_whole_one(system: System, client: openai.AsyncOpenAI) -> None:
    fields = chat(extra_body={"request_id": "same"}, seed=7, max_tokens=40)
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 40
    assert {chunk.id for chunk in chunks} == {"chatcmpl-same"}


async def test_the_output_ends_before_a_stop_string_and_its_booking_is_freed(
    system: System, client: openai.AsyncOpenAI
) -> None:
    fields = chat(extra_body={"request_id": "same"}, seed=7, max_tokens=300)
    whole = (await client.chat.completions.create(**fields)).choices[0].message.content or ""
    stop = whole[20:26]
    stopped = (await client.chat.completions.create(**fields, stop=[stop, "never to be seen"])).choices[0]
    assert stopped.message.content == whole[: whole.index(stop)]
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra is not None
    assert stopped.model_extra["stop_reason"] == stop
    await system.until_idle()
    streamed = await client.chat.completions.create(**fields, stop=stop, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
    assert text == stopped.message.content
    await system.until_idle()


async def test_several_sequences_and_prompts_have_an_index_each(system: System, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt=["first", "second"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    stream = await client.completions.create(model=MODEL, prompt=[[5, 6], [7]], n=2, max_tokens=4, stream=True)
    indexes = {chunk.choices[0].index async for chunk in stream}
    assert indexes == {0, 1, 2, 3}
    chats = await client.chat.completions.create(**chat(n=3))
    assert [choice.index for choice in chats.choices] == [0, 1, 2]
    await system.until_idle()


async def test_a_completion_takes_text_or_token_ids_and_may_repeat_the_text(
    system: System, client: openai.AsyncOpenAI
) -> None:
    ids = {"return_token_ids": True}
    text = await client.completions.create(model=MODEL, prompt="the end of it", max_tokens=4, echo=True, extra_body=ids)
    assert text.choices[0].text.startswith("the end of it")
    extra = text.choices[0].model_extra
    assert extra is not None
    assert len(extra["token_ids"]) == 4
    tokens = await client.completions.create(model=MODEL, prompt=extra["prompt_token_ids"], max_tokens=4)
    assert tokens.usage is not None
    assert text.usage is not None
    assert tokens.usage.prompt_tokens == text.usage.prompt_tokens
    assert tokens.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
async def test_the_most_likely_tokens_are_returned(system: System, client: openai.AsyncOpenAI, stream: bool) -> None:
    wanted = chat(max_tokens=3, logprobs=True, top_logprobs=4)
    answers = [await client.chat.completions.create(**wanted)]
    if stream:
        answers = [chunk async for chunk in await client.chat.completions.create(**wanted, stream=True)]
    choices = [choice for answer in answers for choice in answer.choices if choice.logprobs]
    content = [each for choice in choices for each in choice.logprobs.content]
    assert len(content) == 3
    for each in content:
        values = [alternative.logprob for alternative in each.top_logprobs]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert each.top_logprobs[0].token == each.token
    whole = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, logprobs=2)
    shown = whole.choices[0].logprobs
    assert shown is not None
    assert shown.top_logprobs is not None
    assert len(shown.top_logprobs) == 3


async def test_models_are_listed_and_found(system: System, client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "kvrouter"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/nobody")
    assert caught.value.param == "model"


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content.0",
    ),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 1000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop": ["x"] * 99}, "stop"),
    ({"top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"extra_body": {"guided_choice": []}}, "guided_choice"),
    ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs"),
    ({"logit_bias": {"1": 5}}, "logit_bias"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
    ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ({"extra_headers": {"x-data-parallel-rank": "7"}}, "dp_rank"),
    ({"extra_body": {"dp_rank": 7}}, "dp_rank"),
    ({"extra_headers": {"x-data-parallel-rank": "first"}}, "x-data-parallel-rank"),
]
"""Fields, and the one that the error names."""


async def test_a_bad_chat_is_an_error_that_names_the_field(
    system: System, client: openai.AsyncOpenAI, subtests: pytest.Subtests
) -> None:
    for fields, field in BAD_CHATS:
        with subtests.test(fields=str(fields)[:80]):
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError) as caught:
                    await client.chat.completions.create(**(chat() | fields), stream=stream)
                assert (caught.value.status_code, caught.value.param) == (400, field)
            assert await system.booked() == [0]


async def test_an_unknown_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(**chat(model="nobody"))
    assert caught.value.param == "model"


async def test_a_client_that_leaves_frees_its_requests(system: System, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(**chat(n=2, max_tokens=4000), stream=True)
    await anext(aiter(stream))
    await stream.close()
    await system.until_idle()


async def test_requests_are_served_side_by_side(system: System, client: openai.AsyncOpenAI) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(client.chat.completions.create(**chat(seed=number))) for number in range(20)]
    assert all(task.result().choices[0].message.content for task in asked)
    await system.until_idle()
