"""Replays a trace against servers with the OpenAI API: a simulated vLLM server, and ones that fail."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kvrouter.devtools.replay.open_loop import replay
from kvrouter.devtools.replay.openai_target import OpenAiOptions, TargetFailed, openai_target, served_models
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.vllm.app import serving_vllm
from prometheus_client import CollectorRegistry

MODEL = "mock-model"
FAST = TimeScale(load=1000.0, clock=1.0)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def trace(count: int) -> list[TraceRequest]:
    """Requests that share their first 512 tokens."""
    return [TraceRequest(index, index * 100.0, 1000, 6, (1, 2 + index)) for index in range(count)]


async def replayed(url: str, count: int = 3, **options: object) -> list[RequestRecord]:
    async with openai_target(OpenAiOptions(url, MODEL, **options)) as target:  # type: ignore[arg-type]
        return (await replay(target, trace(count), FAST)).records


@pytest.fixture
async def engine() -> AsyncIterator[str]:
    settings = MockerSettings(
        openai=True, enable_prompt_tokens_details=True, clock_factor=20, max_batched_tokens=1024, drain_seconds=0.1
    )
    async with serving_vllm(settings, CollectorRegistry()) as server:
        yield server.url


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post("/v1/completions", handler)
    async with TestServer(application) as server:
        yield str(server.make_url("")).rstrip("/")


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
async def test_models_are_listed_from_any_form_of_the_url(engine: str, suffix: str) -> None:
    assert list(await served_models(engine + suffix, "")) == [MODEL]


async def test_every_request_has_its_tokens_times_and_cached_tokens(engine: str) -> None:
    first, *others = await replayed(engine)
    for record in (first, *others):
        assert (record.error_message, record.completed) == ("", True)
        assert record.output_tokens == 6
        assert record.ttft_ms is not None
        assert len(record.itl_ms) == 5
    again = await replayed(engine)
    assert all(record.cached_tokens and record.cached_tokens >= 512 for record in again)


async def test_runs_with_salts_of_their_own_share_no_blocks(engine: str) -> None:
    await replayed(engine, 1, cache_salt="a")
    (apart,) = await replayed(engine, 1, cache_salt="b")
    (same,) = await replayed(engine, 1, cache_salt="b")
    assert not apart.cached_tokens
    assert same.cached_tokens


async def test_prompts_stay_within_the_vocabulary() -> None:
    received: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        received.extend((await request.json())["prompt"])
        return web.Response(text="data: [DONE]\n\n")

    async with answering(handler) as url:
        await replayed(url, 1, vocabulary=1000)
    assert len(received) == 1000
    assert max(received) < 1000


async def test_the_worker_that_a_router_names_is_recorded() -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="data: [DONE]\n\n", headers={"x-kvrouter-worker": "18446744073709551615:3"})

    async with answering(handler) as url:
        (record,) = await replayed(url, 1)
    assert record.worker == ((1 << 64) - 1, 3)


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (429, json.dumps({"error": {"message": "busy"}}), "HTTP_429", "busy"),
        (500, "<html>", "HTTP_500", "<html>"),
        (200, 'data: {"error": {"message": "lost"}}\n\n', "STREAM", "lost"),
        (200, 'data: {"choices": [{"text": "a"}]}\n\n', "UNFINISHED", "without [DONE]"),
        (200, "data: garbage\n\n", "CONNECTION", "malformed"),
    ],
)
async def test_a_failure_is_recorded_and_fails_nothing_else(status: int, body: str, error: str, message: str) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with answering(handler) as url:
        records = await replayed(url, 2)
    for record in records:
        assert (record.error, message in record.error_message) == (error, True), record.error_message


async def test_a_server_that_is_away_is_named() -> None:
    with pytest.raises(TargetFailed, match=r"http://127\.0\.0\.1:1 does not answer"):
        await served_models("http://127.0.0.1:1", "")
