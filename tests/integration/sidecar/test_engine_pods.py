"""One sidecar for all pods of a selector, in the place of one in each pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.net.etcd import connect
from kvrouter.runtime.telemetry.health import HealthBoard
from kvrouter.sidecar.app import running
from kvrouter.sidecar.engine_options import worker_id_of
from kvrouter.sidecar.settings import SidecarSettings
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from prometheus_client import CollectorRegistry

from ...kube_api_server import KubeApiServer, pod, serving_kube_api, write_kubeconfig
from .rig import until, vllm


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeApiServer]:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with serving_kube_api() as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "kubeconfig", server, namespace="mine")))
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
