"""The HTTP API: completions whole and streamed, models, health, metrics; and errors in their one shape."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from ....waiting import until
from ..gateway import MODEL, System


@pytest.fixture
async def http(system: System) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{system.http}") as session:
        yield session


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(range(40)), "max_tokens": 5} | fields


async def test_a_completion_answers_token_ids(system: System, http: aiohttp.ClientSession) -> None:
    await system.start_worker(1)
    answers = []
    for _ in range(2):
        async with http.post("/v1/completions", json=body(request_id="twice", seed=7)) as response:
            assert response.status == 200
            answers.append(await response.json())
    first, second = answers
    assert len(first["choices"][0]["token_ids"]) == 5
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["prompt_tokens"] == 40
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert second["kvrouter"]["worker_id"] == 1


async def test_a_stream_has_the_same_tokens(system: System, http: aiohttp.ClientSession) -> None:
    await system.start_worker(1)
    async with http.post("/v1/completions", json=body(request_id="twice", seed=7)) as response:
        whole = await response.json()
    wanted = body(request_id="twice", seed=7, stream=True, stream_options={"include_usage": True})
    async with http.post("/v1/completions", json=wanted) as response:
        assert response.content_type == "text/event-stream"
        lines = [line.decode() async for line in response.content if line.strip()]
    assert lines[-1] == "data: [DONE]\n"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_chunks_come_as_tokens_do(system: System, http: aiohttp.ClientSession) -> None:
    worker = await system.start_worker(1, clock_factor=0.2)
    async with http.post("/v1/completions", json=body(stream=True, max_tokens=400)) as response:
        first = await response.content.readline()
        assert first.startswith(b"data: {")
        assert worker.stats().requests == 1, "the first chunk is here while the request runs"
    await until(lambda: worker.stats().requests == 0)
    await system.until_idle()


async def test_a_client_that_disconnects_during_prefill_frees_its_load(
    system: System, http: aiohttp.ClientSession
) -> None:
    worker = await system.start_worker(1, clock_factor=0.01)
    asking = asyncio.create_task(http.post("/v1/completions", json=body()).__aenter__())
    await until(lambda: worker.stats().requests == 1)
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: worker.stats().requests == 0)
    await system.until_idle()


@pytest.mark.parametrize(
    ("sent", "status", "param"),
    [
        (body(model="nobody"), 404, "model"),
        (body(prompt=[]), 400, "prompt"),
        (body(prompt="text"), 400, "prompt"),
        (body(max_tokens=0), 400, "max_tokens"),
        (body(router_config_override={"router_temperature": -1}), 400, "router_config_override.router_temperature"),
        (
            body(router_config_override={"active_decode_blocks_threshold": 2}),
            400,
            "router_config_override.active_decode_blocks_threshold",
        ),
        (body(worker_id=9, router_config_override={"mode": "direct"}), 404, "worker_id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_one_shape(
    system: System, http: aiohttp.ClientSession, sent: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    await system.start_worker(1)
    async with http.post("/v1/completions", json=sent | {"stream": stream}) as response:
        assert response.status == status
        error = (await response.json())["error"]
    assert error["param"] == param
    assert error["message"]


async def test_a_body_that_is_no_json_is_refused(system: System, http: aiohttp.ClientSession) -> None:
    await system.start_worker(1)
    async with http.post("/v1/completions", data=b"{") as response:
        assert response.status == 400
    async with http.get("/v1/completions") as response:
        assert response.status == 405
    async with http.get("/nothing") as response:
        assert response.status == 404
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    async with http.post("/v1/chat/completions", json=chat) as response:
        assert response.status == 400
        assert "token ids to /v1/completions" in (await response.json())["error"]["message"]


async def test_without_workers_the_answer_says_when_to_retry(system: System, http: aiohttp.ClientSession) -> None:
    system.wait_for_no_restart()
    await system.start_worker(1)
    await system.stop_worker(1)
    async with http.post("/v1/completions", json=body()) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1


async def test_health_models_and_metrics(system: System, http: aiohttp.ClientSession) -> None:
    await system.start_worker(1)
    async with http.get("/health") as response:
        assert response.status == 200
        assert (await response.json())["models"] == {MODEL: {"workers": 1}}
    async with http.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == [MODEL]
    async with http.post("/v1/completions", json=body()) as response:
        assert response.status == 200
        await response.read()  # Otherwise its connection is closed, beside a new one.
    await system.until_idle()
    async with http.get("/metrics") as response:
        text = await response.text()
    assert f'kvrouter_frontend_requests_total{{code="OK",model="{MODEL}"}} 1.0' in text
    assert f'kvrouter_frontend_output_tokens_total{{model="{MODEL}"}} 5.0' in text
    assert f'kvrouter_frontend_inter_token_seconds_count{{model="{MODEL}"}} 4.0' in text
    assert f'kvrouter_frontend_request_seconds_count{{model="{MODEL}"}} 1.0' in text
    assert 'kvrouter_bound_used{bound="frontend_http_connections",when_full="refuses"} 1.0' in text


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", "/v1/completions", body(n=0), 400),
        ("POST", "/v1/completions", body(prompt=5), 400),
        ("POST", "/v1/completions", body(model="other"), 404),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/completions", None, 405),
    ],
)
async def test_an_error_has_the_id_of_its_request(
    system: System, http: aiohttp.ClientSession, method: str, path: str, sent: Any, status: int
) -> None:
    await system.start_worker(1)
    ids = []
    for given in ({"x-request-id": "mine"}, {}, {"x-request-id": "x" * 500}):
        async with http.request(method, path, json=sent, headers=given) as response:
            assert response.status in (status, 400)
            ids.append(response.headers["x-request-id"])
    assert ids[0] == "mine"
    assert len(ids[1]) == len(ids[2]) == 32
    assert ids[1] != ids[2]


async def test_an_error_has_the_id_in_its_body(system: System, http: aiohttp.ClientSession) -> None:
    await system.start_worker(1)
    async with http.post("/v1/completions", json=body(request_id="in the body", dp_rank=7)) as response:
        assert response.status == 400
        assert response.headers["x-request-id"] == "in the body"


async def test_what_is_no_prompt_is_refused_by_what_the_model_takes(
    system: System, http: aiohttp.ClientSession
) -> None:
    await system.start_worker(1)
    for prompt in (5, {}, [1, -1], None):
        async with http.post("/v1/completions", json=body(prompt=prompt)) as response:
            error = (await response.json())["error"]
            assert response.status == 400
            assert "Send a text, a list of token ids" in error["message"]
