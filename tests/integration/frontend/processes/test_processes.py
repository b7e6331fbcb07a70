"""A Frontend of several processes: one port, one view of its metrics, and no process that is missed for long."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions
from prometheus_client.parser import text_string_to_metric_families

from ....waiting import until

pytestmark = pytest.mark.timeout(180)

MODEL = "mock-model"
PROCESSES = 2


@dataclass
class Gateway:
    """A running Frontend. ``options`` start another one with the same workers."""

    process: subprocess.Popen[bytes]
    options: list[str]
    http: str
    grpc: str
    ops: str

    async def get(self, url: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def complete(self, **fields: Any) -> dict[str, Any]:
        """Serves one request, over a connection of its own."""
        body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1} | fields
        async with aiohttp.ClientSession() as session, session.post(f"{self.http}/v1/completions", json=body) as answer:
            completion: dict[str, Any] = await answer.json()
            assert answer.status == 200, completion
            return completion

    async def samples(self, name: str, url: str = "") -> dict[str, float]:
        """The samples of a metric, by process; "" for a metric of the whole."""
        try:
            _, text = await self.get(url or f"{self.ops}/metrics")
        except aiohttp.ClientError:
            return {}
        families = [family for family in text_string_to_metric_families(text) if name.startswith(family.name)]
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        values: dict[str, float] = {}
        for sample in samples:
            process = sample.labels.get("process", "")
            values[process] = values.get(process, 0) + sample.value
        return values

    async def served(self) -> float:
        return (await self.samples("kvrouter_frontend_requests_total")).get("", 0)

    async def until_counted(self, requests: float) -> None:
        """Returns when so many requests have been served: one is counted after its client has the response."""

        async def counted() -> bool:
            return await self.served() == requests

        await until(counted, 120)

    async def ready_processes(self) -> list[str]:
        try:
            _, text = await self.get(f"{self.ops}/ready")
        except aiohttp.ClientError:
            return []
        return [name for name, ready in json.loads(text)["processes"].items() if ready]

    def children(self) -> set[int]:
        found = set()
        for status in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(status.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid:
                found.add(int(status.parent.name))
        return found


def start(module: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *options], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def system() -> Iterator[list[str]]:
    worker, scheduler = (f"127.0.0.1:{free_port()}" for _ in range(2))
    listed = ["--static-workers", worker, "--static-model", MODEL]
    mocker = ["--no-registration", "--bind", worker, "--http-bind", "", "--num-blocks", "20000"]
    running = [
        start("kvrouter.mocker", *mocker, "--speed", "1000000"),
        start("kvrouter.scheduler", "--bind", scheduler, "--http-bind", "", "--router-mode", "round-robin", *listed),
    ]
    yield [*listed, "--static-schedulers", scheduler, "--log-level", "warning"]
    for each in running:
        each.kill()
        each.wait()


@pytest.fixture
def silence_seconds() -> str:
    """Silence after which a process is replaced: none of a busy machine is as long."""
    return "60"


@pytest.fixture
async def gateway(system: list[str], silence_seconds: str) -> AsyncIterator[Gateway]:
    http, rpc, ops = (free_port() for _ in range(3))
    ports = ["--port", str(http), "--bind", f"127.0.0.1:{rpc}", "--http-bind", f"127.0.0.1:{ops}"]
    options = [*system, "--processes", str(PROCESSES), "--process-silence-seconds", silence_seconds]
    process = start("kvrouter.frontend", *options, *ports)
    running = Gateway(process, options, f"http://127.0.0.1:{http}", f"127.0.0.1:{rpc}", f"http://127.0.0.1:{ops}")
    try:

        async def all_ready() -> bool:
            assert process.poll() is None
            return len(await running.ready_processes()) == PROCESSES

        await until(all_ready, 120)
        yield running
    finally:
        process.terminate()
        process.wait(60)


async def test_all_processes_serve_http_and_grpc_and_count_together(gateway: Gateway) -> None:
    async def each_has_served() -> bool:
        nonlocal requests
        await gateway.complete()
        requests += 1
        return len(await gateway.samples("kvrouter_frontend_http_connections")) == PROCESSES and requests >= 20

    requests = 0
    await until(each_has_served, 120)
    options = [("grpc.use_local_subchannel_pool", 1)]
    generating = FrontendServiceGenerateRequest(
        model=MODEL, token_ids=TokenIds(ids=[1, 2, 3]), stop_conditions=StopConditions(max_tokens=1)
    ).SerializeToString()
    for _ in range(10):
        async with grpc.aio.insecure_channel(gateway.grpc, options=options) as channel:
            generate: Any = channel.unary_stream("/kvrouter.v1.FrontendService/Generate")
            assert [response async for response in generate(generating)]
    await gateway.until_counted(requests + 10)
    by_api = await gateway.samples("kvrouter_frontend_requests_total", f"{gateway.http}/metrics")
    assert by_api[""] == requests + 10, "the API of every process has the metrics of all"
    ttft = await gateway.samples("kvrouter_frontend_ttft_seconds_count")
    assert ttft[""] == requests + 10
    assert (await gateway.samples("kvrouter_frontend_processes"))["parent"] == PROCESSES


async def test_a_process_that_is_killed_is_replaced_while_the_others_serve(gateway: Gateway) -> None:
    for _ in range(10):
        await gateway.complete()
    before = 10
    await gateway.until_counted(before)
    victim, *_ = gateway.children()
    os.kill(victim, signal.SIGKILL)

    async def replaced() -> bool:
        assert await gateway.served() >= before, "what it counted is kept"
        now = gateway.children()
        return victim not in now and len(await gateway.ready_processes()) == PROCESSES

    await until(replaced, 120)
    assert (await gateway.samples("kvrouter_frontend_process_restarts_total"))[""] == 1
    for _ in range(10):
        await gateway.complete()
    await gateway.until_counted(before + 10)


@pytest.mark.full
@pytest.mark.parametrize("silence_seconds", ["3"])
async def test_a_process_that_hangs_is_replaced(gateway: Gateway) -> None:
    await gateway.complete()
    before = await gateway.served()
    victim, *_ = gateway.children()
    os.kill(victim, signal.SIGSTOP)

    async def replaced() -> bool:
        return victim not in gateway.children() and len(await gateway.ready_processes()) == PROCESSES

    await until(replaced, 120)
    assert (await gateway.samples("kvrouter_frontend_process_restarts_total"))[""] >= 1
    for _ in range(10):
        await gateway.complete()
    assert await gateway.served() == before + 10, "what it counted is kept"


@pytest.mark.full
async def test_a_second_frontend_on_a_port_is_refused(gateway: Gateway) -> None:
    async def refused(port: str, bind: str, processes: str) -> None:
        command = [sys.executable, "-m", "kvrouter.frontend", *gateway.options, "--processes", processes]
        second = await asyncio.create_subprocess_exec(
            *command, "--port", port, "--bind", bind, "--http-bind", "", stderr=asyncio.subprocess.PIPE
        )
        _, logged = await second.communicate()
        assert second.returncode == 1
        assert b"cannot listen on" in logged
        await gateway.complete()

    await refused(gateway.http.rpartition(":")[2], "127.0.0.1:0", "1")
    await refused("0", gateway.grpc, "2")


@pytest.mark.full
async def test_children_end_with_a_parent_that_is_killed(gateway: Gateway) -> None:
    children = gateway.children()
    assert len(children) == PROCESSES
    gateway.process.kill()

    async def ended() -> bool:
        return not any(os.path.exists(f"/proc/{child}") for child in children)  # noqa: ASYNC240

    await until(ended, 120)


@pytest.mark.full
async def test_a_stop_lets_running_requests_finish(gateway: Gateway) -> None:
    async with aiohttp.ClientSession() as session:
        body = {"model": MODEL, "prompt": [1] * 64, "max_tokens": 20_000, "stream": True}
        async with session.post(f"{gateway.http}/v1/completions", json=body) as response:
            assert (await response.content.readline()).startswith(b"data: {")
            gateway.process.terminate()
            text = await response.content.read()
    assert text.endswith(b"data: [DONE]\n\n")
    assert await asyncio.to_thread(gateway.process.wait, 60) == 0


@pytest.mark.full
async def test_an_invalid_configuration_of_a_child_ends_the_parent(system: list[str]) -> None:
    options = [*system, "--processes", "2", "--port", "0", "--http-bind", "", "--record", "/proc/nowhere/x"]
    refused = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrouter.frontend", *options, stderr=asyncio.subprocess.DEVNULL
    )
    assert await refused.wait() != 0
