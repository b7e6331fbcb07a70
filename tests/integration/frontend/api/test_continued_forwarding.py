"""Forwarded streams of token ids continue on another engine, and leave one that generates nothing any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from ..gateway import MODEL, System, running_system
from .test_forwarding import Engine, start_engine

PROMPT = list(range(40))
TOKENS, BEFORE = 12, 5
EXPECTED = [1000 + number for number in range(TOKENS)]

Fail = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    options: dict[str, Any] = {"worker_probe_seconds": 0.05, "worker_stall_seconds": 0.2}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as found:
        yield found


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as running:
        yield running


def completion(**fields: Any) -> dict[str, Any]:
    known = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "min_tokens": 7,
        "seed": 3,
        "field_of_the_engine": 1,
    }
    return known | {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}} | fields


def event(engine: str, number: int, finish: str | None = None, *, has_ids: bool = True) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": f"<{number}>", "finish_reason": finish}
    if has_ids:
        choice["token_ids"] = [1000 + number]
    return b"data: %b\n\n" % json.dumps({"id": engine, "created": 1, "choices": [choice]}).encode()


def generates(name: str, *, until: int = TOKENS, fail: Fail | None = None, has_ids: bool = True) -> Any:
    """Generates tokens by their position, up to ``until``; then ends the stream, or fails."""

    async def respond(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        first, prompt_tokens = len(body["prompt"]) - len(PROMPT), len(body["prompt"])
        last = first + body["max_tokens"] - 1
        for number in range(first, min(last + 1, until)):
            await response.write(event(name, number, "length" if number == last else None, has_ids=has_ids))
        if fail is not None:
            await fail(request, response)
            return response
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": last + 1 - first, "total_tokens": 52}
        await response.write(b"data: %b\n\n" % json.dumps({"id": name, "choices": [], "usage": usage}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    return respond


async def breaks_off(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b'data: {"choices":[{"tok')
    assert request.transport is not None
    request.transport.abort()


async def ends(request: web.Request, response: web.StreamResponse) -> None:
    """Ends the stream without its last event."""


async def reports_an_error(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\ndata: [DONE]\n\n')


async def aborts(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b'data: {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\n')


async def start_two(system: System, stack: AsyncExitStack) -> list[Engine]:
    return [await start_engine(system, stack, worker_id) for worker_id in (1, 2)]


async def post(system: System, **fields: Any) -> list[Any]:
    """Returns the events of a stream that have come whole."""
    url = f"http://{system.http}/v1/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=completion(**fields)) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.endswith(("}", "]"))]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def tokens_of(events: list[Any]) -> list[int]:
    return [
        token
        for each in events
        if each != "[DONE]"
        for choice in each.get("choices", ())
        for token in choice.get("token_ids", ())
    ]


@pytest.mark.parametrize("fail", [breaks_off, ends, reports_an_error, aborts])
async def test_a_stream_of_token_ids_continues_on_another_engine(
    system: System, stack: AsyncExitStack, fail: Fail
) -> None:
    engines = await start_two(system, stack)
    calls = 0

    async def respond(request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        answer = generates("first", until=BEFORE, fail=fail) if calls == 1 else generates("second")
        return await answer(request, body)

    for engine in engines:
        engine.respond = respond
    events = await post(system)
    assert tokens_of(events) == EXPECTED
    assert [each for each in events if each == "[DONE]"] == events[-1:] == ["[DONE]"]
    assert {each["id"] for each in events[:-1]} == {"first"}
    notices = [(number, each["kvrouter"]) for number, each in enumerate(events[:-1]) if "kvrouter" in each]
    assert [number for number, _ in notices] == [BEFORE]
    assert (notices[0][1]["migrations"], notices[0][1]["inexact_continuation"]) == (1, True)
    usage = events[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), TOKENS)
    bodies = [json.loads(body) for engine in engines for body in engine.bodies]
    bodies.sort(key=lambda body: len(body["prompt"]))
    assert bodies[0] == completion()
    assert bodies[1] == completion(prompt=PROMPT + EXPECTED[:BEFORE], max_tokens=TOKENS - BEFORE, min_tokens=7 - BEFORE)
    await system.until_idle()


async def test_a_stream_whose_engine_is_lost_after_its_end_is_whole(system: System, stack: AsyncExitStack) -> None:
    engines = await start_two(system, stack)
    for engine in engines:
        engine.respond = generates("first", fail=breaks_off)
    events = await post(system)
    assert tokens_of(events) == EXPECTED
    assert events[-1] == "[DONE]"
    assert sum(len(engine.bodies) for engine in engines) == 1
    await system.until_idle()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"n": 2}, "several sequences"),
        ({"stop": ["x"]}, "it has stop"),
        ({"prompt": "text"}, "not a list of token ids"),
    ],
)
async def test_a_stream_that_cannot_continue_ends_with_the_reason(
    system: System, stack: AsyncExitStack, fields: dict[str, Any], why: str
) -> None:
    for engine in await start_two(system, stack):
        engine.respond = generates("first", until=BEFORE, fail=breaks_off)
    events = await post(system, **fields)
    assert why in events[-1]["error"]["message"]
    await system.until_idle()


async def test_a_stream_of_an_engine_without_token_ids_ends_with_the_reason(
    system: System, stack: AsyncExitStack
) -> None:
    for engine in await start_two(system, stack):
        engine.respond = generates("first", until=BEFORE, fail=breaks_off, has_ids=False)
    events = await post(system)
    assert len(events) == BEFORE + 1
    assert "its engine returns no token ids" in events[-1]["error"]["message"]
    await system.until_idle()


async def test_requests_leave_an_engine_that_generates_nothing_any_more(system: System, stack: AsyncExitStack) -> None:
    engines = await start_two(system, stack)
    for engine in engines:
        engine.respond = generates("first")
    while not all(engine.bodies for engine in engines):  # A worker that is known to be fast stalls soon.
        await post(system)
    hung = asyncio.Event()

    async def hang(request: web.Request, body: Any) -> web.StreamResponse:
        hung.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        return web.StreamResponse()

    engines[0].respond = hang
    while not hung.is_set():
        assert tokens_of(await post(system)) == EXPECTED
    await system.until_idle()
