"""What changes while an engine runs is registered: its adapters, and whether it sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from kvrouter.v1.common_pb2 import BlockScope
from kvrouter.v1.registry_pb2 import WorkerRegistration

from ...waiting import until
from .rig import Beside, EngineServer, Sidecar, registration, sglang, tokens_of, until_registered, vllm

PROMPT = list(range(1, 19))


async def post(url: str, **body: Any) -> None:
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        await http.post(url, json=body)


@pytest.mark.parametrize(("server", "prefix"), [(vllm, "/v1"), (sglang, "")])
async def test_adapters_that_are_loaded_later_are_registered(
    server: Callable[..., EngineServer], prefix: str, run: Beside, namespace: str, etcd_endpoint: str
) -> None:
    engine = server(lora_modules={"first": "/1"})
    async with engine.started(), run(engine.url, worker_id=1) as sidecar:
        await sidecar.ready()
        before = await registration(namespace, etcd_endpoint, 1)

        async def until_adapters(*names: str) -> WorkerRegistration:
            return await until_registered(namespace, etcd_endpoint, 1, lambda found: list(found.lora_names) == [*names])

        await post(f"{engine.url}{prefix}/load_lora_adapter", lora_name="second", lora_path="/2")
        found = await until_adapters("first", "second")
        assert found.ranks[0].incarnation == before.ranks[0].incarnation
        assert tokens_of(await sidecar.generate(PROMPT, scope=BlockScope(lora_name="second")))
        await post(f"{engine.url}{prefix}/unload_lora_adapter", lora_name="first")
        await until_adapters("second")
        assert sidecar.count("registrations_total") == 1


async def test_an_engine_that_sleeps_takes_no_requests_until_it_is_woken(
    run: Beside, namespace: str, etcd_endpoint: str
) -> None:
    engine = vllm()
    async with engine.started(), run(engine.url, worker_id=1) as sidecar:
        await sidecar.ready()
        await sidecar.generate(PROMPT)
        await until(lambda: bool(sidecar.blocks()))
        await _slept(engine, sidecar, namespace, etcd_endpoint)
        await post(f"{engine.url}/wake_up")
        await until_registered(namespace, etcd_endpoint, 1, lambda found: not found.draining)
        await until(lambda: sidecar.health.ready)
        assert tokens_of(await sidecar.generate(PROMPT))
        assert sidecar.count("registrations_total") == 1
        assert sidecar.count("outages_total") == 0


async def _slept(engine: EngineServer, sidecar: Sidecar, namespace: str, etcd_endpoint: str) -> None:
    await post(f"{engine.url}/sleep")
    await until_registered(namespace, etcd_endpoint, 1, lambda found: found.draining)
    await until(lambda: not sidecar.health.ready and not sidecar.blocks())
