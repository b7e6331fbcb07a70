"""Images find the cache that vLLM's events report of them, in chats, Messages and Responses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ...byte_tokenizer import write_byte_tokenizer
from ...waiting import until
from ..sidecar.rig import BLOCK, EngineServer, vllm
from .no_broker import NoBroker, serving

pytestmark = pytest.mark.timeout(180)

RECORDED = json.loads((Path(__file__).parents[2] / "unit" / "engines" / "image_ids.json").read_text())
FILES = {image["name"]: image["file"] for image in RECORDED["images"]}
BEFORE = "Look at this picture, please. " * 2
AFTER = " What is there to be seen in it? " * 3


@dataclass(frozen=True)
class Seen:
    """What a client sees of a request."""

    worker: str
    routed_on: str
    predicted: int
    cached: int
    prompt: int


async def ask(system: NoBroker, path: str, body: dict[str, Any]) -> Seen:
    """Sends a request. Returns when its booking has ended and the index has the blocks of its prompt."""
    async with system.session.post(f"http://{system.http}{path}", json={"model": "m"} | body) as response:
        answer: Any = await response.json()
        assert response.status == 200, answer
        headers, usage = response.headers, answer["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        seen = Seen(
            headers["x-kvrouter-worker"],
            headers["x-kvrouter-routed-on"],
            int(headers["x-kvrouter-overlap-blocks"]) * BLOCK,
            details.get("cached_tokens", -1),
            usage.get("prompt_tokens", usage.get("input_tokens")),
        )
    await system.settled(seen.worker, seen.prompt // BLOCK)
    return seen


def image(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def embedded(name: str) -> str:
    return f"data:image/x;base64,{FILES[name]}"


def chat(*parts: str | dict[str, Any], **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2} | fields


@pytest.fixture
async def engines() -> AsyncIterator[list[EngineServer]]:
    async with AsyncExitStack() as stack:
        started = [vllm(enable_prompt_tokens_details=True, num_blocks=256) for _ in range(2)]
        for each in started:
            await stack.enter_async_context(each.started())
        yield started


@pytest.fixture
async def system(engines: list[EngineServer], tmp_path: Path) -> AsyncIterator[NoBroker]:
    directory = write_byte_tokenizer(tmp_path / "model", media=True)
    options = ("--tokenizers", f"m={directory}")
    async with serving(tmp_path, *(each.url for each in engines), options=options) as running:
        await running.serving(2)
        yield running


async def holders(system: NoBroker, prompt: int) -> set[str]:
    """Returns the workers whose blocks in the index may hold a prompt of so many tokens."""
    return {f"{worker}:0" for worker, rank in (await system.ranks()).items() if rank.blocks >= prompt // BLOCK}


async def settled(system: NoBroker, body: dict[str, Any], *, path: str = "/v1/chat/completions") -> Seen:
    """Sends a request until it finds what the requests before have left, which both engines may hold by then."""
    seen = await ask(system, path, body)

    async def finds_it() -> bool:
        nonlocal seen
        seen = await ask(system, path, body)
        return seen.predicted == seen.cached > 0

    await until(finds_it, 60)
    return seen


@pytest.mark.parametrize(
    "name", ["PNG", *(pytest.param(name, marks=pytest.mark.full) for name in ("JPEG", "PNG with alpha", "GIF", "WebP"))]
)
async def test_an_image_sent_again_is_predicted_as_the_engine_reports_it(system: NoBroker, name: str) -> None:
    body = chat(BEFORE, image(embedded(name)), AFTER)
    first = await ask(system, "/v1/chat/completions", body)
    assert (first.predicted, first.cached) == (0, 0)
    assert first.routed_on == "estimate", "the length of its image was not known"
    second = await settled(system, body)
    assert second.routed_on == "tokens"
    assert second.worker in await holders(system, second.prompt)
    assert second.cached == (second.prompt - 1) // BLOCK * BLOCK


async def test_another_image_shares_only_what_is_before_it(system: NoBroker) -> None:
    known = await settled(system, chat(BEFORE, image(embedded("PNG")), AFTER))
    other = await ask(system, "/v1/chat/completions", chat(BEFORE, image(embedded("grey PNG")), AFTER))
    assert other.routed_on == "tokens", "an image of the same size has the same length"
    assert other.worker in await holders(system, known.prompt)
    assert other.predicted == other.cached == len(f"<|user|>\n{BEFORE}") // BLOCK * BLOCK


@pytest.mark.full
async def test_a_conversation_with_several_images_is_followed(system: NoBroker) -> None:
    parts: list[Any] = [BEFORE, image(embedded("PNG")), AFTER]
    await settled(system, chat(*parts))
    for name in ("JPEG", "PNG", "GIF"):
        before = await settled(system, chat(*parts))
        parts += [image(embedded(name)), AFTER]
        longer = await settled(system, chat(*parts))
        assert longer.worker in await holders(system, longer.prompt)
        assert longer.cached == (longer.prompt - 1) // BLOCK * BLOCK > before.cached


async def test_messages_and_responses_find_the_image_of_a_chat(system: NoBroker) -> None:
    known = await settled(system, chat(BEFORE, image(embedded("PNG")), AFTER))
    source = {"type": "base64", "media_type": "image/png", "data": FILES["PNG"]}
    content: list[dict[str, Any]] = [
        {"type": "text", "text": BEFORE},
        {"type": "image", "source": source},
        {"type": "text", "text": AFTER},
    ]
    messages = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    seen = await ask(system, "/v1/messages", messages)
    assert (seen.routed_on, seen.predicted, seen.prompt) == ("tokens", known.predicted, known.prompt)
    assert seen.worker in await holders(system, known.prompt)
    url = f"http://{system.http}/v1/messages/count_tokens"
    async with system.session.post(url, json={"model": "m", "messages": messages["messages"]}) as response:
        assert await response.json() == {"input_tokens": known.prompt}
    content = [
        {"type": "input_text", "text": BEFORE},
        {"type": "input_image", "image_url": embedded("PNG")},
        {"type": "input_text", "text": AFTER},
    ]
    body = {"model": "m", "input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    async with system.session.post(f"http://{system.http}/v1/responses", json=body) as response:
        # The simulated engine lacks the API, so only the decision is seen.
        headers = response.headers
        assert int(headers["x-kvrouter-overlap-blocks"]) * BLOCK == known.predicted
        assert headers["x-kvrouter-routed-on"] == "tokens"
        assert headers["x-kvrouter-worker"] in await holders(system, known.prompt)


async def test_a_stream_is_learned_from_too(system: NoBroker) -> None:
    body = chat(BEFORE, image(embedded("PNG")), AFTER)
    streamed = {"model": "m", "stream": True, "stream_options": {"include_usage": True}} | body

    async def is_learned() -> bool:
        async with system.session.post(f"http://{system.http}/v1/chat/completions", json=streamed) as response:
            await response.read()
            return response.headers["x-kvrouter-routed-on"] == "tokens"

    await until(is_learned, 60)


@pytest.mark.full
async def test_an_image_by_its_url_is_not_fetched_and_followed_where_the_text_before_it_is_cached(
    system: NoBroker, engines: list[EngineServer]
) -> None:
    body = chat(BEFORE, image("http://127.0.0.1:1/picture.png"), AFTER)
    seen = await settled(system, body)
    assert seen.routed_on == "tokens", "its length was learned"
    assert seen.cached == (seen.prompt - 1) // BLOCK * BLOCK
    other = await ask(system, "/v1/chat/completions", chat(BEFORE, image("http://127.0.0.1:1/other.png"), AFTER))
    assert other.predicted == len(f"<|user|>\n{BEFORE}") // BLOCK * BLOCK
    for engine in engines:
        async with system.session.post(f"{engine.url}/reset_prefix_cache") as response:
            assert response.status == 200

    async def is_emptied() -> bool:
        return not any(rank.blocks for rank in (await system.ranks()).values())

    await until(is_emptied, 60)
    assert (await ask(system, "/v1/chat/completions", body)).predicted == 0


@pytest.mark.full
async def test_a_sound_sent_again_is_followed(system: NoBroker) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
    seen = await settled(system, chat(BEFORE, sound, AFTER))
    assert seen.cached == (seen.prompt - 1) // BLOCK * BLOCK
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRh==", "format": "wav"}}
    assert (await ask(system, "/v1/chat/completions", chat(BEFORE, sound, AFTER))).predicted < seen.predicted
