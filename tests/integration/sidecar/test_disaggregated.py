"""A Frontend in front of prefill and decode servers of vLLM and SGLang, with sidecars beside them."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.scheduler_pb2 import GetStatusRequest, GetStatusResponse
from kvrouter.v1.worker_pb2 import StopConditions

from ...waiting import until
from ..frontend.gateway import System, request, running_system
from .rig import Beside, EngineServer, sglang, vllm

SCHEDULING: dict[str, Any] = {"remote_prefill_min_tokens": 32, "kv_transfer_latency_ms": 0.0}


def served(server: ServedEngine) -> int:
    """Prompt tokens of the requests that an engine has begun."""
    return sum(driver.prompt_tokens_total for driver in server.service.drivers.values())


@pytest.mark.parametrize(
    ("first", "second", "roles"),
    [
        (vllm(role="prefill"), vllm(role="decode"), True),
        (sglang(role="prefill", disaggregation_bootstrap_port=0), sglang(role="decode"), False),
    ],
    ids=["vllm", "sglang"],
)
async def test_both_servers_run_a_request(
    first: EngineServer,
    second: EngineServer,
    roles: bool,
    run: Beside,
    namespace: str,
    etcd_endpoint: str,
    nats_url: str,
) -> None:
    """vLLM does not say its role, so the sidecar's options do."""
    options: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode"}] if roles else [{}, {}]
    async with (
        running_system(nats_url, etcd_endpoint, namespace, scheduling=SCHEDULING) as system,
        first.started() as prefill,
        second.started() as decode,
        run(first.url, component="prefill", **options[0]) as prefill_sidecar,
        run(second.url, component="decode", **options[1]) as decode_sidecar,
    ):
        await prefill_sidecar.ready()
        await decode_sidecar.ready()
        await until_known(system)
        for number in range(3):
            sent = request(
                range(1000 * number, 1000 * number + 100), model="m", stop_conditions=StopConditions(max_tokens=5)
            )
            pieces = [piece async for piece in system.client.generate(sent, deadline=Deadline.after(30))]
            assert sum(len(piece.output.token_ids) for piece in pieces) == 5
            assert pieces[0].routing.prefill_rank.worker_id == prefill_sidecar.supervisor.options.worker_id
            assert pieces[0].routing.rank.worker_id == decode_sidecar.supervisor.options.worker_id
            await until_idle(system)  # A prefill worker that counts as busy may not be worth its detour.
        assert (served(prefill), served(decode)) == (300, 300)


@pytest.mark.parametrize(
    ("first", "second", "roles"),
    [
        (vllm(role="prefill"), vllm(role="decode"), True),
        (sglang(role="prefill", disaggregation_bootstrap_port=0), sglang(role="decode"), False),
    ],
    ids=["vllm", "sglang"],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_both_servers_run_a_forwarded_request(
    first: EngineServer,
    second: EngineServer,
    roles: bool,
    streamed: bool,
    run: Beside,
    namespace: str,
    etcd_endpoint: str,
    nats_url: str,
) -> None:
    options: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode"}] if roles else [{}, {}]
    chat = {"role": "user", "content": "twenty words " * 10}
    body = {"model": "m", "messages": [chat], "max_tokens": 5, "stream": streamed, "stream_options": None, "top_k": 7}
    async with (
        running_system(nats_url, etcd_endpoint, namespace, scheduling=SCHEDULING) as system,
        first.started() as prefill,
        second.started() as decode,
        run(first.url, component="prefill", **options[0]) as prefill_sidecar,
        run(second.url, component="decode", **options[1]) as decode_sidecar,
        aiohttp.ClientSession() as client,
    ):
        await prefill_sidecar.ready()
        await decode_sidecar.ready()
        await until_known(system)
        async with client.post(f"http://{system.http}/v1/chat/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
        worker = prefill_sidecar.supervisor.options.worker_id
        assert response.headers["x-kvrouter-prefill-worker"] == f"{worker}:0"
        assert (served(prefill), served(decode)) == (served(decode), served(prefill)) != (0, 0)
        await until_idle(system)


async def test_a_forwarded_request_for_several_sequences_runs_at_the_decode_server_alone(
    run: Beside, namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    first, second = vllm(role="prefill"), vllm(role="decode")
    chat = {"role": "user", "content": "twenty words " * 10}
    body = {"model": "m", "messages": [chat], "max_tokens": 5, "n": 2}
    async with (
        running_system(nats_url, etcd_endpoint, namespace, scheduling=SCHEDULING) as system,
        first.started() as prefill,
        second.started(),
        run(first.url, component="prefill", role="prefill") as prefill_sidecar,
        run(second.url, component="decode", role="decode") as decode_sidecar,
        aiohttp.ClientSession() as client,
    ):
        await prefill_sidecar.ready()
        await decode_sidecar.ready()
        await until_known(system)
        async with client.post(f"http://{system.http}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        assert "x-kvrouter-prefill-worker" not in response.headers
        assert served(prefill) == 0
        await until_idle(system)


async def until_known(system: System) -> None:
    """Waits until the Frontend and the Scheduler know a worker of each pool."""
    directory = system.runtime.directory
    await until(lambda: sum(bool(view.workers) for view in directory.components.values()) == 2)
    await until(system.frontend.ready)
    async with asyncio.timeout(30):
        while sum(bool(each.ranks) for each in (await status(system)).components) < 2:
            await asyncio.sleep(0.01)


async def status(system: System) -> GetStatusResponse:
    return await system.scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(10))


async def until_idle(system: System) -> None:
    async with asyncio.timeout(30):
        while (await status(system)).bookings:
            await asyncio.sleep(0.01)
