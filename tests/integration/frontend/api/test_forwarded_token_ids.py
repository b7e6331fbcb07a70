"""Completions that are forwarded with the token ids of their text, where the response is the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from tokenizers import Tokenizer

from ....waiting import until
from ..gateway import MODEL, System, running_system
from .test_forwarding import start_engine

TEXT = "Where does it open a socket?"


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str, tmp_path: Path) -> AsyncIterator[System]:
    write_small_tokenizer(tmp_path)
    options: dict[str, Any] = {"tokenizers": {MODEL: str(tmp_path)}, "forward_token_ids": True}
    async with running_system(nats_url, etcd_endpoint, namespace, **options) as running:
        yield running


async def sent(system: System, engine: str, *, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    """Returns the body that an engine gets of a request."""
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
        server = await start_engine(system, stack, 1, engine=engine)
        await until(lambda: system.frontend.models.has_text(MODEL))
        body = {"model": MODEL, "max_tokens": 4, "odd": [1.0]} | fields
        async with http.post(f"http://{system.http}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["x-kvrouter-routed-on"] == "tokens"
            await response.read()
        await system.until_idle()
        (got,) = server.bodies
        return json.loads(got)  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_an_engine_gets_the_tokens_of_a_text(system: System, engine: str, tmp_path: Path) -> None:
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids
    got = await sent(system, engine, prompt=TEXT, logprobs=2, n=2, stop=["x"], echo=False)
    fields = {"logprobs": 2, "n": 2, "stop": ["x"], "echo": False}
    assert got == {"model": MODEL, "max_tokens": 4, "odd": [1.0], "prompt": ids} | fields


@pytest.mark.parametrize(
    ("engine", "fields"),
    [
        ("", {"prompt": TEXT}),
        ("vllm", {"prompt": [TEXT]}),
        ("vllm", {"prompt": [TEXT, "b"]}),
        ("vllm", {"prompt": TEXT, "echo": True}),
        ("vllm", {"prompt": TEXT, "suffix": "b"}),
        ("vllm", {"prompt": TEXT, "prompt_logprobs": 0}),
        ("vllm", {"messages": [{"role": "user", "content": TEXT}], "path": "/v1/chat/completions"}),
    ],
)
async def test_an_engine_gets_the_text_where_more_than_its_tokens_counts(
    system: System, engine: str, fields: dict[str, Any]
) -> None:
    got = await sent(system, engine, **fields)
    for name in ("prompt", "messages"):
        assert got.get(name) == fields.get(name)
