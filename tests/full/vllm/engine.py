"""A real vLLM server on the CPU, with a tiny model of random weights, and what it publishes of its cache."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import zmq
import zmq.asyncio
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import with_parent
from kvrouter.engines.events.zmq_frames import encode_sequence, read_replayed

from ...byte_tokenizer import write_byte_tokenizer
from ...integration.sidecar.rig import events_at
from ...tool_chats import HERMES

MODEL = "tiny"
BLOCK = 32
KEY = "engine-secret"
READY_SECONDS = 400
_LENGTH = 16_384
_SAYS = "<|im_start|>assistant\n"
_THINKS = "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
TEMPLATE = HERMES.replace(_SAYS + "{{ message.content }}", _SAYS + _THINKS + "{{ message.content or '' }}")
"""Prints tools, calls and their results, and reasoning."""


def write_model(directory: Path) -> Path:
    """Writes a tiny model whose tokens are bytes, without weights. Returns its directory."""
    write_byte_tokenizer(directory)
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256}
    config |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 1, "max_position_embeddings": _LENGTH, "torch_dtype": "float32"}
    config["eos_token_id"] = None  # Outputs end at their maximum.
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return directory


@dataclass
class VllmServer:
    """A vLLM server that can be killed and started again at its ports."""

    python: str
    model: Path
    logs: Path
    options: tuple[str, ...] = ()
    ports: list[int] = field(default_factory=lambda: free_ports(3))
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def replay(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[2]}"

    def start(self) -> None:
        """Starts it in a session of its own. It belongs to no event loop, so that tests can share it."""
        port, live, replay = self.ports
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        command = (
            *("nice", "-n", "10", self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", MODEL, "--load-format", "dummy", "--enforce-eager"),
            *("--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--max-model-len", str(_LENGTH)),
            *("--dtype", "float32", "--block-size", str(BLOCK), "--max-num-seqs", "8"),
            *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
            *("--kv-events-config", events_at(live, replay).replace('"topic"', '"publisher": "zmq", "topic"')),
            *self.options,
        )
        with (self.logs / f"vllm-{port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                with_parent(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Kills it with its children."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def ready(self) -> None:
        """Returns once it serves."""
        async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession() as session:
            while True:
                assert self._process is not None
                assert self._process.poll() is None, f"vLLM ended: see {self.logs}"
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the server's own answer to a request."""
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(self.url + path, json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
            return answer


class Published:
    """The cache of a server by all that it has published since its start, read from its replay socket."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._next = 0
        self._copies: Counter[int] = Counter()
        self.cleared = 0
        self.evicted = 0

    async def blocks(self) -> set[int]:
        """Returns the hashes of the blocks in the cache."""
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._server.replay)
            await socket.send_multipart([b"", encode_sequence(self._next)])
            while message := read_replayed(await asyncio.wait_for(socket.recv_multipart(), 30)):
                assert message.sequence == self._next, "the server's replay buffer is too small"
                self._next += 1
                for event in msgspec.msgpack.decode(message.payload)[1]:
                    self._apply(event)
        assert min(self._copies.values(), default=0) >= 0
        return set(+self._copies)

    def _apply(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "AllBlocksCleared":
                self._copies.clear()
                self.cleared += 1
            case "BlockStored":
                self._copies.update(event["block_hashes"])
            case "BlockRemoved":
                self._copies.subtract(event["block_hashes"])
                self.evicted += len(event["block_hashes"])
