"""Requests reach engines that demand a key, forwarded or as tokens, and streams of tokens survive an engine's death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ...byte_tokenizer import write_byte_tokenizer
from ...waiting import until
from ..frontend.access.keys import Keys
from ..frontend.gateway import MODEL, running_system
from .rig import Beside, EngineServer, sglang, vllm, write_engine_keys
from .system import BLOCK, running_system as running_processes

KEY = "engine-secret"
TOKENS = 600
CHAT = {"messages": [{"role": "user", "content": "Tell a long story."}]}


@pytest.mark.parametrize("forward", ["yes", pytest.param("no", marks=pytest.mark.full)])
@pytest.mark.parametrize("server", [vllm, sglang])
async def test_engines_get_their_own_key_instead_of_the_clients(
    server: Callable[..., EngineServer],
    forward: str,
    run: Beside,
    tmp_path: Path,
    nats_url: str,
    etcd_endpoint: str,
    namespace: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    clients = Keys(tmp_path / "clients.json")
    clients.add("client")
    clients.write()
    path = tmp_path / "engines.toml"
    engine_keys = write_engine_keys(path, workers=KEY)
    tokenizer = str(write_byte_tokenizer(tmp_path / "tokenizer"))
    options = clients.options() | {"engine_keys_file": engine_keys, "tokenizers": {MODEL: tokenizer}}
    engine = server(model=MODEL, api_key=KEY, enable_prompt_tokens_details=True, vocabulary_size=200)
    async with (
        running_system(nats_url, etcd_endpoint, namespace, **options) as system,
        engine.started(),
        run(engine.url, worker_id=1, forward=forward, engine_keys_file=engine_keys, load_seconds=5) as sidecar,
        aiohttp.ClientSession() as http,
    ):
        await sidecar.ready()
        await system.until_candidate(1)
        await until(lambda: system.frontend.models.texts.find(MODEL) is not None)

        async def complete() -> tuple[int, Any]:
            body = CHAT | {"model": MODEL, "max_tokens": 4}
            headers = {"authorization": f"Bearer {clients['client']}"}
            async with http.post(f"http://{system.http}/v1/chat/completions", json=body, headers=headers) as response:
                return response.status, await response.json()

        async def received() -> list[dict[str, Any]]:
            async with http.get(f"{engine.url}/mock/requests") as response:
                # A Frontend compares its tokens with the engine's when it has time to.
                others = ("abort", "tokenize")
                return [each for each in await response.json() if not any(name in each["path"] for name in others)]

        status, answer = await complete()
        assert status == 200, answer
        (request,) = await received()
        assert request["headers"]["authorization"] == f"Bearer {KEY}"
        assert request["path"] == "/v1/chat/completions" or forward == "no"
        assert "messages" not in request["body"] or forward == "yes"
        # A changed file is used at once. A key that the engine refuses is no fault of the client's credential.
        write_engine_keys(path, workers="wrong")
        status, answer = await complete()
        assert status == 503, answer
        write_engine_keys(path, workers=KEY)
        async with asyncio.timeout(30):  # the worker was backed off
            while (await complete())[0] != 200:
                await asyncio.sleep(0.05)
        assert clients.secrets[0] not in json.dumps(await received())
    assert KEY not in "".join(capfd.readouterr())


@pytest.mark.timeout(120)
async def test_forwarded_chats_with_tools_find_their_prefix(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    """Engines render tools with other keys, in another order, and with nulls."""
    tokenizer = str(write_byte_tokenizer(tmp_path / "tokenizer"))
    engine = ("--num-blocks", "4096")
    async with running_processes(
        tmp_path, nats_url, etcd_endpoint, namespace, ("--tokenizer", tokenizer), engine
    ) as system:
        await system.complete(list(range(1, 50)))
        function = {"parameters": {"type": "object"}, "name": "now", "x-unknown": 1}
        tools = [{"function": function, "type": "function"}, {"type": "function", "function": {"name": "then"}}]
        body = CHAT | {"model": "m", "max_tokens": 4, "tools": tools, "tool_choice": "none"}
        async with asyncio.timeout(60):
            while True:  # until the Frontend has fetched the tokenizer, and the index has the blocks
                async with system.session.post(f"{system.http}/v1/chat/completions", json=body) as response:
                    answer, headers = await response.json(), response.headers
                    if response.status == 200 and headers["x-kvrouter-overlap-blocks"] != "0":
                        break
                await asyncio.sleep(0.05)
        assert headers["x-kvrouter-routed-on"] == "tokens"
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (
            cached == int(headers["x-kvrouter-overlap-blocks"]) * BLOCK == (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
        )


@pytest.mark.timeout(120)
async def test_a_streamed_chat_of_tokens_continues_when_its_engine_dies(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    tokenizer = str(write_byte_tokenizer(tmp_path / "tokenizer"))
    engine_keys = write_engine_keys(tmp_path / "engines.toml", workers=KEY)
    sidecar = ("--forward", "no", "--tokenizer", tokenizer, "--engine-keys-file", engine_keys)
    engine = ("--api-key", KEY, "--vocabulary-size", "200", "--num-blocks", "4096")
    async with running_processes(tmp_path, nats_url, etcd_endpoint, namespace, sidecar, engine) as system:
        await system.complete(list(range(1, 50)))
        body = CHAT | {"model": "m", "max_tokens": TOKENS, "ignore_eos": True}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        url = f"{system.http}/v1/chat/completions"
        async with asyncio.timeout(60):
            while True:  # until the Frontend has fetched the tokenizer
                async with system.session.post(url, json=body | {"max_tokens": 1}) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.1)
        usage: dict[str, Any] = {}
        killed, last = 0, b""
        async with system.session.post(url, json=streamed) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not killed and b'"content"' in line:
                    killed = int(response.headers["x-kvrouter-worker"].partition(":")[0])
                    await system.kill(f"engine-{killed}")
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:]).get("usage") or usage
                last = line.strip() or last
        assert last == b"data: [DONE]"
        assert usage["completion_tokens"] == TOKENS
