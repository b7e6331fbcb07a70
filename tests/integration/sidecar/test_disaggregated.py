"""A Frontend in front of prefill and decode servers of vLLM and SGLang, with sidecars beside them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.scheduler_pb2 import GetStatusRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ..frontend.gateway import System, request, running_system
from .rig import Beside, EngineServer, sglang, until, vllm

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
        await until(lambda: len(system.runtime.directory.components) == 2 and system.frontend.ready())
        for number in range(3):
            sent = request(
                range(1000 * number, 1000 * number + 100), model="m", stop_conditions=StopConditions(max_tokens=5)
            )
            pieces = [piece async for piece in system.client.generate(sent, deadline=Deadline.after(30))]
            assert sum(len(piece.output.token_ids) for piece in pieces) == 5
            assert pieces[0].routing.prefill_rank.worker_id == prefill_sidecar.supervisor.options.worker_id
            assert pieces[0].routing.rank.worker_id == decode_sidecar.supervisor.options.worker_id
        assert (served(prefill), served(decode)) == (300, 300)
        await until_idle(system)


async def until_idle(system: System) -> None:
    async with asyncio.timeout(30):
        while (await system.scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(10))).bookings:
            await asyncio.sleep(0.01)
