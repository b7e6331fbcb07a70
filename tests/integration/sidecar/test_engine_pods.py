"""One sidecar for all pods of a selector, in the place of one in each pod."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.net.etcd import connect
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.app import running
from kvrouter.sidecar.engine_options import worker_id_of
from kvrouter.sidecar.settings import SidecarSettings
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from prometheus_client import CollectorRegistry

from ...kube_api_server import KubeApiServer, as_with_kubectl, pod, serving_kube_api
from ...waiting import until
from .rig import vllm


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeApiServer]:
    async with serving_kube_api() as server:
        as_with_kubectl(monkeypatch, tmp_path, server, namespace="mine")
        yield server


async def test_workers_follow_pods(
    namespace: str, etcd_endpoint: str, nats_url: str, kube: KubeApiServer, tmp_path: Path
) -> None:
    port = free_port()
    hosts = ("127.0.0.2", "127.0.0.3")
    one, two = (replace(vllm(), bind=f"{host}:{port}") for host in hosts)
    first, second = worker_id_of(one.url), worker_id_of(two.url)
    settings = SidecarSettings(
        namespace=namespace,
        etcd=etcd_endpoint,
        nats=nats_url,
        engine_pods=f"app=vllm:{port}",
        state=tmp_path,
        drain_seconds=0.2,
        load_seconds=0.05,
    )
    health = HealthBoard()
    async with one.started(), two.started(), running(settings, CollectorRegistry(), health) as engines:
        await kube.put(pod("one", hosts[0]), pod("elsewhere", "127.0.0.4"), namespace="mine")
        await until(lambda: health.ready)
        await until(lambda: bool(engines.worker_keys))
        await kube.delete("elsewhere", namespace="mine")
        await kube.put(pod("two", hosts[1]), namespace="mine")

        async def registration(worker_id: int, condition: Callable[[WorkerRegistration], bool]) -> WorkerRegistration:
            """Waits until a worker is registered and a condition holds for it."""
            key = ComponentName(namespace, "workers").worker_key(worker_id).encode()
            async with asyncio.timeout(30), connect(etcd_endpoint) as client:
                while True:
                    entry = await client.get(key)
                    if entry is not None and condition(found := WorkerRegistration.FromString(entry.value)):
                        return found
                    await asyncio.sleep(0.02)

        before = await registration(first, lambda found: not found.draining)
        other = await registration(second, lambda found: not found.draining)
        gateways = [before.openai_endpoint, other.openai_endpoint]
        assert gateways == [one.url, two.url], "gateways know engines by the addresses of their pods"

        await kube.put(pod("one", hosts[0], ready=False), namespace="mine")
        held = await registration(first, lambda found: found.draining)
        await kube.put(pod("one", hosts[0]), namespace="mine")
        again = await registration(first, lambda found: not found.draining)
        assert held.ranks == again.ranks == before.ranks, "its cache stays known"
        await kube.put(pod("one", hosts[0], restarts=1), namespace="mine")
        await registration(first, lambda found: found.ranks[0].incarnation > before.ranks[0].incarnation)

        await kube.terminate("two", namespace="mine")
        await until(lambda: [each.options.worker_id for each in engines.supervisors] == [first])
        async with connect(etcd_endpoint) as client:
            assert await client.get(ComponentName(namespace, "workers").worker_key(second).encode()) is None


@pytest.mark.parametrize("end", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGKILL])
async def test_requests_wait_while_the_sidecar_of_all_pods_is_replaced(
    namespace: str, etcd_endpoint: str, nats_url: str, kube: KubeApiServer, tmp_path: Path, end: signal.Signals
) -> None:
    engine = replace(vllm(), bind=f"127.0.0.2:{free_port()}")
    http = free_port()
    where = ("--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url, "--drain-seconds", "1")
    programs = {
        "serve": ("--port", str(http), "--http-bind", "", "--pool-restart-seconds", "60"),
        "sidecar": ("--engine-pods", f"app=vllm:{engine.url.rpartition(':')[2]}", "--lease-seconds", "2"),
    }
    await kube.put(pod("one", "127.0.0.2"), namespace="mine")
    async with engine.started(), AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        refusals: list[str] = []

        async def start(name: str) -> ManagedProcess:
            arguments = (sys.executable, "-m", "kvrouter.cli.main", name, *where, *programs[name])
            process = await ManagedProcess.start(Command(name, arguments, dict(os.environ)), tmp_path)
            stack.push_async_callback(process.stop, 20)
            return process

        async def ask() -> int:
            body = {"model": "m", "prompt": list(range(9)), "max_tokens": 2}
            async with session.post(f"http://127.0.0.1:{http}/v1/completions", json=body) as response:
                if response.status != 200:
                    refusals.append(f"{response.status}: {await response.text()}")
                return response.status

        await start("serve")
        sidecar = await start("sidecar")
        async with asyncio.timeout(60):
            while True:
                with suppress(aiohttp.ClientConnectorError):
                    if await ask() == 200:
                        break
                await asyncio.sleep(0.05)
        answered, refusals[:] = 0, []

        async def ask_on() -> None:
            nonlocal answered
            while True:
                await ask()
                answered += 1

        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(ask_on())
            os.kill(sidecar.pid, end)
            await sidecar.stop(20)
            await start("sidecar")
            log = tmp_path / "sidecar.log"
            await until(lambda: log.read_text().count("registration.written") == 2)
            before = answered
            await until(lambda: answered > before + 3)
            asking.cancel()
        assert refusals == []
