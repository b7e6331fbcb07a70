"""The router predicts the cached tokens that a real vLLM on the CPU reports, for chats with tools as for token ids.

KVROUTER_VLLM_PYTHON names a Python with vLLM. The model is a tiny one with random weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.common_pb2 import RoutingRequest, TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceFindMatchesRequest

from ..byte_tokenizer import write_byte_tokenizer
from ..integration.sidecar.rig import events_at, write_engine_keys
from ..tool_chats import HERMES, generate

MODEL = "tiny"
BLOCK = 32
REQUESTS = 300
LENGTH = 16_384
KEY = "engine-secret"
_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
_SEED = 3


def write_model(directory: Path) -> Path:
    """Writes a tiny model whose tokens are bytes, without weights."""
    write_byte_tokenizer(directory)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256}
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": LENGTH, "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": HERMES}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


class Served:
    """A router before a vLLM server."""

    def __init__(self, http: str, frontend: Frontend, session: aiohttp.ClientSession) -> None:
        self.http = http
        self.frontend = frontend
        self.session = session

    async def post(self, body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        sent = body | {"model": MODEL, "return_token_ids": True, "ignore_eos": True}
        async with self.session.post(self.http + path, json=sent) as response:
            return response.status, dict(response.headers), await response.json()

    async def until_indexed(self, tokens: list[int]) -> None:
        """Returns when the index has all blocks of a sequence that the engine has computed and cached."""
        request = FrontendServiceFindMatchesRequest(request=RoutingRequest(model=MODEL, token_ids=TokenIds(ids=tokens)))
        async with asyncio.timeout(30):
            while True:
                answer = await self.frontend.find_matches(request, deadline=Deadline.after(10))
                # The last token is returned and not computed.
                if max((each.device_blocks for each in answer.overlaps), default=0) >= (len(tokens) - 1) // BLOCK:
                    return
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(python: str, tmp_path: Path, where: tuple[str, ...]) -> AsyncIterator[Served]:
    engine_port, http_port, grpc_port, live, replay = free_ports(5)
    directory = write_model(tmp_path / "model")
    keys = write_engine_keys(tmp_path / "keys.toml", workers=KEY)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    vllm = (
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), "--port", str(engine_port)),
        *("--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager", "--max-model-len", str(LENGTH)),
        *("--dtype", "float32", "--block-size", str(BLOCK), "--max-num-seqs", "4", "--enable-prompt-tokens-details"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-key", KEY, "--host", "127.0.0.1"),
        *("--kv-events-config", events_at(live, replay).replace('"topic"', '"publisher": "zmq", "topic"')),
    )
    kvrouter = (sys.executable, "-m", "kvrouter.cli.main")
    router = ("--port", str(http_port), "--bind", f"127.0.0.1:{grpc_port}", "--http-bind", "")
    sidecar = ("--engine", f"http://127.0.0.1:{engine_port}", "--worker-id", "1", "--tokenizer", str(directory))
    commands = [
        Command("vllm", vllm, environment),
        Command("router", (*kvrouter, "serve", *where, *router, "--engine-keys-file", keys), dict(os.environ)),
        Command("sidecar", (*kvrouter, "sidecar", *where, *sidecar, "--engine-keys-file", keys), dict(os.environ)),
    ]
    async with AsyncExitStack() as stack:
        for command in commands:
            process = await ManagedProcess.start(command, tmp_path)
            stack.push_async_callback(process.stop, 20)
        async with (
            aiohttp.ClientSession() as session,
            open_channel(f"127.0.0.1:{grpc_port}") as channel,
        ):
            served = Served(f"http://127.0.0.1:{http_port}", cast(Frontend, remote(_FRONTEND, channel)), session)
            async with asyncio.timeout(400):
                while not await _is_ready(served):
                    await asyncio.sleep(0.5)
            yield served


async def _is_ready(served: Served) -> bool:
    """Returns whether chats reach the engine and are routed on their tokens."""
    try:
        status, headers, _ = await served.post({"messages": [{"role": "user", "content": "?"}], "max_tokens": 1})
    except aiohttp.ClientError:
        return False
    return status == 200 and headers.get("x-kvrouter-routed-on") == "tokens"


def bodies(count: int) -> list[dict[str, Any]]:
    """Returns requests that share prefixes: chats with tools, texts and token ids."""
    draw = random.Random(_SEED)
    chats = [chat for chat in generate(_SEED, 60) if chat.get("tool_choice") in (None, "none", "auto")]
    text = " ".join(draw.choices(["cache", "prefix", "block", "token", "größe", "東京"], k=600))
    token_ids = [draw.randrange(1, 256) for _ in range(64 * BLOCK)]
    made: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": draw.randint(1, 40)}
        if number % 5 < 3:
            chat = draw.choice(chats[:20])
            further = [{"role": "user", "content": text[: draw.randrange(1, 200)]}] if draw.random() < 0.3 else []
            body |= {name: chat[name] for name in ("tools", "tool_choice") if name in chat}
            if any(tool["function"].get("strict") for tool in body["tools"]):
                body["tool_choice"] = "none"  # vLLM constrains the output, and refuses names that are not ASCII.
            body["messages"] = [*chat["messages"], *further]
        elif number % 5 == 3:
            # Of each second prompt all blocks are full.
            blocks = draw.randint(1, 64)
            body["prompt"] = token_ids[: blocks * BLOCK - (number % 2) * draw.randrange(BLOCK)]
        else:
            body["prompt"] = text[: draw.randrange(1, len(text))]
        made.append(body)
    return made


@pytest.mark.timeout(1100)
async def test_predicted_cached_tokens_are_those_that_vllm_reports(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    python = os.environ.get("KVROUTER_VLLM_PYTHON")
    if python is None:
        pytest.skip("KVROUTER_VLLM_PYTHON names no Python with vLLM")
    where = ("--namespace", namespace, "--nats", nats_url, "--etcd", etcd_endpoint, "--drain-seconds", "1")
    differences: Counter[int] = Counter()
    cached, tools = 0, 0
    async with serving(python, tmp_path, where) as served:
        for body in bodies(REQUESTS):
            status, headers, answer = await served.post(body)
            assert status == 200, (body, answer)
            assert headers["x-kvrouter-routed-on"] == "tokens", body
            choice = answer["choices"][0]
            prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
            reported = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            differences[int(headers["x-kvrouter-overlap-blocks"]) * BLOCK - reported] += 1
            cached += reported
            tools += "tools" in body
            await served.until_indexed(array("I", [*prompt, *choice["token_ids"]]).tolist())
    (tmp_path / "result.json").write_text(json.dumps({"differences": differences, "cached": cached, "tools": tools}))
    log = (tmp_path / "router.log").read_text()
    assert '"prompts.compared"' in log
    assert '"prompts.differ"' not in log
    assert cached > 0
    assert differences == {0: REQUESTS}
