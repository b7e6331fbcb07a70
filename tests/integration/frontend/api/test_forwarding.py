"""Requests for workers that have an OpenAI API of their own: forwarded unchanged, returned byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import GetStatusRequest
from prometheus_client import CollectorRegistry

from ....waiting import until
from ..gateway import MODEL, System, running_system

WHOLE = (
    b'{"id": "x",  "choices":[{"message":{"content":"\\u00e9 "}}], "odd": 1e2,\n'
    b'"usage":{"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":32}}}'
)
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":48}}}\n\n'
EVENTS = [b'data: {"choices":[{"delta":{"content":"a"}}], "odd":  1}\n\n', b"data: {}\n\n", b"data: [DONE]\n\n"]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Engine:
    """An engine with an OpenAI API, which records what it receives."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[bytes] = []
        self.reads_json = True
        self.headers: list[Any] = []
        self.targets: list[str] = []
        self.respond: Callable[[web.Request, Any], Coroutine[Any, Any, web.StreamResponse]] = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        self.headers.append(request.headers)
        self.targets.append(request.raw_path)
        return await self.respond(request, json.loads(self.bodies[-1]) if self.reads_json else {})


async def answer(request: web.Request, body: Any) -> web.StreamResponse:
    if not body.get("stream"):
        return web.Response(body=WHOLE, content_type="application/json", headers={"x-engine": "yes"})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in EVENTS:
        await response.write(event)
    return response


async def fail(request: web.Request, body: Any) -> web.StreamResponse:
    raise web.HTTPInternalServerError


async def too_busy_for_a_while(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=429, body=b"{}", content_type="application/json", headers={"Retry-After": "30"})


FAILURE = b'{"error": {"message": "no memory",  "type": "InternalServerError", "code": 500}}'


async def fail_in_words(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=500, body=FAILURE, content_type="application/json")


async def too_busy(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=429, body=b'{"error": "full"}', content_type="application/json")


async def stream_usage(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    sent = b"".join([*EVENTS[:-1], USAGE, EVENTS[-1]])
    for at in range(0, len(sent), 7):
        await response.write(sent[at : at + 7])
    return response


def sample(registry: CollectorRegistry, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    families = registry.collect()
    return sum(each.value for family in families for each in family.samples if each.name == name)


async def set_cookies(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.Response(body=WHOLE, content_type="application/json")
    response.headers.extend([("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")])
    return response


async def refuse(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=422, body=b'{"error": "as the engine says it"}', content_type="application/json")


async def break_in_a_long_response(request: web.Request, body: Any) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(4 << 20)})
    await response.prepare(request)
    await response.write(b"x" * (2 << 20))
    assert request.transport is not None
    request.transport.abort()
    return response


async def start_engine(system: System, stack: AsyncExitStack, worker_id: int, **fields: Any) -> Engine:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/v1/{rest:.+}", engine.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    await register_engine(system, stack, worker_id, engine.url, **fields)
    return engine


async def register_engine(system: System, stack: AsyncExitStack, worker_id: int, url: str, **fields: Any) -> None:
    """Registers a worker in this process for an engine."""
    config = WorkerConfig(
        component=ComponentName(system.where["namespace"], "workers"),
        model=MODEL,
        block_size=16,
        worker_id=worker_id,
        ranks={0: 512, 1: 512},
        etcd=system.where["etcd"],
        nats=system.where["nats"],
        openai_endpoint=url,
        drain_seconds=0.1,
        **fields,
    )
    worker = await stack.enter_async_context(sdk.running(config))
    await worker.registered()
    await until(lambda: system.frontend.ready())
    await system.until_candidate(worker_id)


def chat(**fields: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "field_of_the_engine": [1]} | fields
    return json.dumps(body, indent=3).encode()


async def post(system: System, body: bytes, **headers: str) -> tuple[aiohttp.ClientResponse, bytes]:
    url = f"http://{system.http}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=headers) as response:
        return response, await response.read()


async def test_a_body_and_its_response_pass_unchanged(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    body = chat()
    trace = {"traceparent": TRACEPARENT, "tracestate": "vendor=abc", "baggage": "tenant=blue"}
    response, received = await post(system, body, authorization="Bearer t", **{"x-request-id": "mine"}, **trace)
    assert engine.bodies == [body]
    assert received == WHOLE
    assert response.headers["x-engine"] == "yes"
    assert response.headers["x-request-id"] == "mine"
    worker, _, rank = response.headers["x-kvrouter-worker"].partition(":")
    assert worker == "1"
    assert engine.headers[0]["x-data-parallel-rank"] == rank
    assert engine.headers[0]["authorization"] == "Bearer t"
    assert {name: engine.headers[0].get(name) for name in trace} == trace
    # No tokenizer is known here, and the worker has events.
    assert response.headers["x-kvrouter-routed-on"] == "estimate"
    await system.until_idle()


@pytest.mark.parametrize(
    ("body", "publishes_events", "mode", "routed_on"),
    [
        ({"prompt": [1, 2, 3]}, True, "round-robin", "tokens"),
        ({"messages": [{"role": "user", "content": "x"}]}, True, "round-robin", "estimate"),
        ({"messages": [{"role": "user", "content": "x"}]}, False, "round-robin", "text"),
        ({"prompt": "x", "prompt_embeds": "x"}, False, "round-robin", "text"),
        ({}, True, "round-robin", "load"),
        ({"prompt": list(range(64))}, True, "kv", "load"),  # there is no Indexer
    ],
)
async def test_a_response_says_what_its_routing_knew_of_the_prompt(
    nats_url: str,
    etcd_endpoint: str,
    namespace: str,
    stack: AsyncExitStack,
    body: dict[str, Any],
    publishes_events: bool,
    mode: str,
    routed_on: str,
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, scheduling={"router_mode": mode}) as system:
        await start_engine(system, stack, 1, publishes_events=publishes_events)
        response, _ = await post(system, json.dumps({"model": MODEL} | body).encode())
        assert response.headers["x-kvrouter-routed-on"] == routed_on
        await stack.aclose()


async def test_a_rank_that_the_client_names_serves_it(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    for rank in ("0", "1", "1", "0"):
        response, _ = await post(system, chat(), **{"x-data-parallel-rank": rank})
        assert response.headers["x-kvrouter-worker"] == f"1:{rank}"
        assert engine.headers[-1]["x-data-parallel-rank"] == rank
    response, received = await post(system, chat(), **{"x-data-parallel-rank": "first"})
    assert (response.status, json.loads(received)["error"]["param"]) == (400, "x-data-parallel-rank")
    response, received = await post(system, chat(), **{"x-data-parallel-rank": "7"})
    error = json.loads(received)["error"]
    assert (response.status, error["param"]) == (400, "dp_rank")
    assert error["message"].endswith("Use one of: 0, 1.")
    assert len(engine.bodies) == 4
    await system.until_idle()


async def test_an_engine_learns_which_rank_has_more_of_the_prompt(
    nats_url: str, etcd_endpoint: str, namespace: str, stack: AsyncExitStack
) -> None:
    body = json.dumps({"model": MODEL, "prompt": list(range(64))}).encode()
    sources = []
    async with running_system(nats_url, etcd_endpoint, namespace, scheduling={"router_mode": "kv"}) as system:
        engine = await start_engine(system, stack, 1, publishes_events=False)
        for rank in ("0", "1"):
            sent = {"x-data-parallel-rank": rank, "x-kvrouter-kv-source": "9:9; tier=disk; blocks=1"}
            url = f"http://{system.http}/v1/completions"
            async with aiohttp.ClientSession() as http, http.post(url, data=body, headers=sent) as response:
                sources.append(response.headers.get("x-kvrouter-kv-source"))
        await stack.aclose()
    assert sources == [None, "1:0; tier=device; blocks=3"]
    assert [each.get("x-kvrouter-kv-source") for each in engine.headers] == sources, "never the client's"


async def test_a_stream_passes_unchanged(system: System, stack: AsyncExitStack) -> None:
    await start_engine(system, stack, 1)
    response, received = await post(system, chat(stream=True))
    assert response.content_type == "text/event-stream"
    assert received == b"".join(EVENTS)
    await system.until_idle()


async def test_a_long_response_that_breaks_is_not_repeated_by_another_engine(
    system: System, stack: AsyncExitStack
) -> None:
    engines = [await start_engine(system, stack, worker_id) for worker_id in (1, 2)]
    for engine in engines:
        engine.respond = break_in_a_long_response
    with pytest.raises(aiohttp.ClientPayloadError):
        await post(system, chat())
    assert sum(len(engine.bodies) for engine in engines) == 1
    await system.until_idle()


async def test_a_refusal_of_the_engine_passes_unchanged(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    engine.respond = refuse
    response, received = await post(system, chat())
    assert response.status == 422
    assert received == b'{"error": "as the engine says it"}'
    assert len(engine.bodies) == 1
    await system.until_idle()


async def test_headers_that_are_repeated_pass_both_ways(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    engine.respond = set_cookies
    url, named = f"http://{system.http}/v1/chat/completions", [("x-tag", "a"), ("x-tag", "b")]
    async with aiohttp.ClientSession() as http, http.post(url, data=chat(), headers=named) as response:
        assert response.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert engine.headers[0].getall("x-tag") == ["a", "b"]
    await system.until_idle()


async def test_the_query_of_a_request_reaches_the_engine(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    url = f"http://{system.http}/v1/chat/completions?a=1"
    async with aiohttp.ClientSession() as http, http.post(url, data=chat()) as response:
        assert await response.read() == WHOLE
    assert engine.targets == ["/v1/chat/completions?a=1"]
    await system.until_idle()


async def no_such_path(request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(status=404)


async def test_a_server_without_the_path_gives_way_to_another_and_alone_is_an_error_that_says_so(
    system: System, stack: AsyncExitStack
) -> None:
    engines = [await start_engine(system, stack, number) for number in (1, 2)]
    engines[0].respond = no_such_path
    for _ in range(2):
        response, received = await post(system, chat())
        assert (response.status, received) == (200, WHOLE)
    engines[1].respond = no_such_path
    response, received = await post(system, chat())
    assert response.status == 503
    assert b"answers an empty 404 to /v1/chat/completions: check the URL of its OpenAI API" in received
    await system.until_idle()


async def test_a_request_that_an_engine_fails_is_retried_at_another(system: System, stack: AsyncExitStack) -> None:
    engines = [await start_engine(system, stack, number) for number in (1, 2)]
    engines[0].respond = fail
    for _ in range(2):
        response, received = await post(system, chat())
        assert (response.status, received) == (200, WHOLE)
    assert engines[0].bodies
    await system.until_idle()


async def test_a_whole_response_whose_engine_dies_in_the_middle_comes_from_another(
    system: System, stack: AsyncExitStack
) -> None:
    broken = 0

    async def break_off(request: web.Request, body: Any) -> web.StreamResponse:
        nonlocal broken
        broken += 1
        response = web.StreamResponse(headers={"Content-Type": "application/json", "x-engine": "broken"})
        response.content_length = len(WHOLE)
        await response.prepare(request)
        await response.write(WHOLE[:-1])
        assert request.transport is not None
        request.transport.close()  # What was written still arrives.
        return response

    engines = [await start_engine(system, stack, number) for number in (1, 2)]
    engines[0].respond = break_off
    while not broken:
        response, received = await post(system, chat())
        assert (response.status, received, response.headers["x-engine"]) == (200, WHOLE, "yes")
    await system.until_idle()


async def test_a_busy_engine_gives_way_to_another_and_if_all_are_busy_the_client_gets_429(
    system: System, stack: AsyncExitStack
) -> None:
    engines = [await start_engine(system, stack, number) for number in (1, 2)]
    engines[0].respond = too_busy
    for _ in range(2):
        response, received = await post(system, chat())
        assert (response.status, received) == (200, WHOLE)
    assert engines[0].bodies
    engines[1].respond = too_busy
    response, received = await post(system, chat())
    assert (response.status, received) == (429, b'{"error": "full"}')
    assert int(response.headers["retry-after"]) >= 1
    engines[0].respond = engines[1].respond = too_busy_for_a_while
    response, received = await post(system, chat())
    assert (response.headers["retry-after"], response.headers.get("retry-after-ms")) == ("30", None)
    await system.until_idle()


async def test_an_adapter_is_a_model_and_its_requests_reach_workers_that_have_it(
    system: System, stack: AsyncExitStack
) -> None:
    plain = await start_engine(system, stack, 1)
    adapted = await start_engine(system, stack, 2, lora_names=("adapter",))
    async with aiohttp.ClientSession() as http, http.get(f"http://{system.http}/v1/models") as response:
        models = {each["id"]: each["parent"] for each in (await response.json())["data"]}
    assert models == {MODEL: None, "adapter": MODEL}
    for _ in range(3):
        body = chat(model="adapter")
        response, _ = await post(system, body)
        assert response.headers["x-kvrouter-worker"].startswith("2:")
        assert adapted.bodies[-1] == body
    assert not plain.bodies
    await system.until_idle()


async def test_a_model_whose_engines_have_left_is_unavailable_and_not_refused(system: System) -> None:
    async with AsyncExitStack() as engines:
        await start_engine(system, engines, 1)
    await system.until_gone(1)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    response, received = await post(system, json.dumps(body).encode())
    assert (response.status, json.loads(received)["error"]["type"]) == (503, "server_error")


async def test_a_request_that_every_engine_fails_is_an_error(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    engine.respond = fail
    response, received = await post(system, chat())
    assert response.status == 503
    assert "error" in json.loads(received)
    engine.respond = fail_in_words
    response, received = await post(system, chat())
    assert (response.status, received) == (500, FAILURE)
    assert response.headers["x-kvrouter-worker"].startswith("1:")
    await system.until_idle()


async def test_a_client_that_leaves_ends_the_request_at_its_engine(system: System, stack: AsyncExitStack) -> None:
    engine = await start_engine(system, stack, 1)
    cancelled = asyncio.Event()

    async def wait(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0])
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        cancelled.set()
        return response

    engine.respond = wait
    url = f"http://{system.http}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, data=chat(stream=True)) as response:
        await response.content.readany()
    async with asyncio.timeout(30):
        await cancelled.wait()
    await system.until_idle()


async def test_a_stream_whose_engine_fails_ends_with_an_error_event(system: System, stack: AsyncExitStack) -> None:
    async def break_off(request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(EVENTS[0] + b'data: {"cho')
        assert request.transport is not None
        request.transport.abort()
        return response

    engines = [await start_engine(system, stack, worker_id) for worker_id in (1, 2)]
    for engine in engines:
        engine.respond = break_off
    response, body = await post(system, chat(stream=True))
    assert response.status == 200
    assert body.startswith(EVENTS[0])
    assert b"[DONE]" not in body
    last = json.loads(body.strip().rsplit(b"data: ", 1)[1])
    assert last["error"]["code"] == "service_unavailable"
    assert "cannot continue on another worker: it was forwarded as it is" in last["error"]["message"]
    assert sum(len(engine.bodies) for engine in engines) == 1
    await system.until_idle()


@pytest.mark.parametrize("text", ["word " * 30_000, "\u4e2d" * 20_000])
async def test_a_text_that_nobody_has_counted_is_too_long_only_if_the_engine_says_so(
    system: System, stack: AsyncExitStack, text: str
) -> None:
    engine = await start_engine(system, stack, 1, max_model_len=1000)
    body = chat(messages=[{"role": "user", "content": text}], max_tokens=900)
    response, received = await post(system, body)
    assert (response.status, received) == (200, WHOLE)
    engine.respond = refuse
    response, _ = await post(system, body)
    assert response.status == 422
    assert len(engine.bodies) == 2
    await system.until_idle()


@pytest.mark.parametrize(("fields", "slots"), [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5)])
async def test_each_sequence_takes_a_slot(
    system: System, stack: AsyncExitStack, fields: dict[str, int], slots: int
) -> None:
    ends = asyncio.Event()

    async def answer_later(request: web.Request, body: Any) -> web.StreamResponse:
        await ends.wait()
        return await answer(request, body)

    engine = await start_engine(system, stack, 1)
    engine.respond = answer_later
    body = {"model": MODEL, "prompt": [*range(40)], "max_tokens": 4} | fields
    async with asyncio.timeout(30), aiohttp.ClientSession(f"http://{system.http}") as http:
        sending = asyncio.create_task(http.post("/v1/completions", json=body))
        try:
            while await booked_at_all_ranks(system) != slots:
                await asyncio.sleep(0.01)
        finally:
            ends.set()
        assert (await sending).status == 200
        while await booked_at_all_ranks(system):
            await asyncio.sleep(0.01)


async def booked_at_all_ranks(system: System) -> int:
    status = await system.scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(10))
    return sum(rank.active_requests for each in status.components for rank in each.ranks)
