"""Token ids that a model does not have reach no worker: an engine may not survive them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ....byte_tokenizer import write_byte_tokenizer
from ..gateway import MODEL, System, request, running_system
from .test_forwarding import Engine, start_engine

SIZE = 256
"""Tokens of the model."""
BAD_PROMPTS = ["[1, 256]", "[-1]", "[1, -1]", "[4294967296]", "[1e3]", "[[1, 2], [3, 256]]", "[[1], [-2]]", "[[null]]"]


@pytest.fixture
async def system(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    tokenizers = {MODEL: str(write_byte_tokenizer(tmp_path / "tokenizer"))}
    async with running_system(nats_url, etcd_endpoint, namespace, tokenizers=tokenizers) as found:
        yield found


@pytest.fixture
async def engine(system: System) -> AsyncIterator[Engine]:
    async with AsyncExitStack() as stack:
        yield await start_engine(system, stack, 1)


async def until_loaded(system: System) -> None:
    async with asyncio.timeout(30):
        while not system.frontend.models.texts.any_loaded:
            await asyncio.sleep(0.01)


async def post(system: System, path: str, body: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"http://{system.http}{path}", data=body) as response,
    ):
        return response.status, json.loads(await response.read())


def completion(prompt: str, **fields: Any) -> str:
    rest = json.dumps({"model": MODEL, "max_tokens": 4} | fields)
    return f'{{"prompt": {prompt}, {rest[1:]}'


@pytest.mark.parametrize("prompt", BAD_PROMPTS)
async def test_forwarded_prompts_are_refused(system: System, engine: Engine, prompt: str) -> None:
    await until_loaded(system)
    status, answer = await post(system, "/v1/completions", completion(prompt))
    assert status == 400, answer
    assert answer["error"]["param"].startswith("prompt.")
    assert not engine.bodies


async def test_forwarded_stop_tokens_are_refused(system: System, engine: Engine) -> None:
    await until_loaded(system)
    status, answer = await post(system, "/v1/completions", completion("[1]", stop_token_ids=[2, SIZE]))
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids.1")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stop_token_ids": [-1]}
    status, answer = await post(system, "/v1/chat/completions", json.dumps(body))
    assert (status, answer["error"]["param"]) == (400, "stop_token_ids.0")
    assert not engine.bodies


async def test_forwarded_token_ids_of_the_model_pass(system: System, engine: Engine) -> None:
    await until_loaded(system)
    for prompt in ("[0, 255]", "[[0], [255, 3]]", "[]", '["256"]'):
        body = completion(prompt, stop_token_ids=[255])
        assert (await post(system, "/v1/completions", body))[0] == 200
        assert engine.bodies[-1] == body.encode()


async def test_prompts_for_workers_are_refused_over_http_and_grpc(system: System) -> None:
    await system.start_worker(1)
    await until_loaded(system)
    for prompt in BAD_PROMPTS:
        status, answer = await post(system, "/v1/completions", completion(prompt))
        assert status == 400, (prompt, answer)
    stop = StopConditions(max_tokens=4, stop_token_ids=[SIZE])
    for fields in ({"tokens": [1, SIZE]}, {"tokens": [1], "stop_conditions": stop}):
        with pytest.raises(BadRequest, match="the model has no such token"):
            async for _ in system.client.generate(request(**fields), deadline=Deadline.after(30)):
                pass
    assert (await post(system, "/v1/completions", completion("[0, 255]")))[0] == 200
