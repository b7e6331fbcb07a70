"""`kvrouter serve --engine-pods` and `--inference-pool`: engines come, drain, restart and go with their pods."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.sidecar.engine_options import worker_id_of

from ...kube_api_server import KubeApiServer, as_with_kubectl, pod, pool, serving_kube_api
from ...waiting import until
from ..frontend.endpoint_picker.gateway_stream import GatewayStream
from ..sidecar.rig import BLOCK, EngineServer, vllm
from .no_broker import Answer, NoBroker, begun, serving

pytestmark = pytest.mark.timeout(180)

PROMPT = list(range(100, 100 + 8 * BLOCK + 1))
"""A prompt of eight whole blocks."""
ONE, TWO = "127.0.0.2", "127.0.0.3"
"""Addresses of pods."""


@pytest.fixture
async def kube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubeApiServer]:
    async with serving_kube_api() as server:
        as_with_kubectl(monkeypatch, tmp_path, server)
        yield server


def engine(host: str, port: int) -> EngineServer:
    return replace(vllm(enable_prompt_tokens_details=True), bind=f"{host}:{port}")


async def registered(system: NoBroker) -> set[int]:
    return {worker_id for worker_id, each in (await system.ranks()).items() if each.registered}


async def test_engines_follow_their_pods(tmp_path: Path, kube: KubeApiServer) -> None:
    port = free_port()
    one, two = engine(ONE, port), engine(TWO, port)
    first, second = worker_id_of(one.url), worker_id_of(two.url)
    await kube.put(pod("one", ONE), pod("two", TWO, ready=False), pod("web", TWO, app="web"))
    async with (
        one.started(clock_factor=1) as server,
        two.started(),
        serving(tmp_path, options=("--engine-pods", f"app=vllm:{port}", "--drain-seconds", "60")) as system,
    ):
        await system.serving(1)
        assert await registered(system) == {first}, "a pod that is not ready is not followed"
        await system.ready()
        await kube.put(pod("two", TWO))
        await system.serving(2)

        # Readiness keeps requests away, and the index stays.
        await kube.put(pod("two", TWO, ready=False))

        # New ones each time: a prompt that was sent before goes to where it is cached.
        prompts = ([number] * 9 for number in itertools.count())

        async def only_first() -> bool:
            return {(await system.ask(next(prompts))).worker for _ in range(6)} == {f"{first}:0"}

        await until(only_first, 60)
        assert await registered(system) == {first, second}
        await kube.put(pod("two", TWO))

        # A pod that is terminating gets no more requests at once, and its running ones end.
        await kube.terminate("two")
        await until(only_first, 60)

        async def two_has_left() -> bool:
            return await registered(system) == {first}

        await until(two_has_left, 60)
        running = await begun(server, system.ask(PROMPT, max_tokens=60, ignore_eos=True))
        await kube.put(pod("two", TWO, uid="another-pod"))
        await system.serving(2)
        await kube.terminate("one")

        async def moved() -> bool:
            answer = await system.ask(PROMPT)
            return answer.worker == f"{second}:0"

        await until(moved, 60)
        answer = await running
        assert (answer.status, answer.worker) == (200, f"{first}:0"), "a running request is not ended"
        await kube.delete("one")

        async def left() -> bool:
            return await registered(system) == {second}

        await until(left, 60)
        assert kube.lists == 1


async def test_a_restarted_container_is_a_new_incarnation(tmp_path: Path, kube: KubeApiServer) -> None:
    one = engine(ONE, free_port())
    await kube.put(pool("qwen", int(one.bind.rpartition(":")[2]), app="vllm"), pod("one", ONE))
    worker = worker_id_of(one.url)
    async with serving(tmp_path, options=("--inference-pool", "qwen")) as system:
        async with one.started():
            await system.serving(1)
            assert (await system.ask(PROMPT)).status == 200

            async def indexed() -> bool:
                return (await system.ranks())[worker].blocks == 8

            await until(indexed, 60)
            before = (await system.ranks())[worker].cursor.incarnation
        async with one.started():
            await kube.put(pod("one", ONE, restarts=1, ready=False))

            async def gone() -> bool:
                return not await registered(system)

            await until(gone, 60)
            await kube.put(pod("one", ONE, restarts=1))

            async def renewed() -> bool:
                rank = (await system.ranks()).get(worker)
                return rank is not None and rank.registered and rank.cursor.incarnation > before

            await until(renewed, 60)
            await system.serving(1)
            assert await system.ask(PROMPT) == Answer(200, f"{worker}:0", 0, 0)


@pytest.mark.full
async def test_nothing_is_ready_before_the_pods_are_known(tmp_path: Path, kube: KubeApiServer) -> None:
    one = engine(ONE, free_port())
    await kube.put(pod("one", ONE))
    kube.refuses = (403, "Forbidden", "pods is forbidden")
    async with (
        one.started(),
        serving(tmp_path, options=("--engine-pods", f"app=vllm:{one.bind.rpartition(':')[2]}")) as system,
    ):
        await system.until_logged("kubernetes.away")
        async with system.session.get(f"http://{system.ops}/ready") as response:
            assert response.status == 503
        assert await system.metric("kvrouter_kubernetes_up") == 0
        kube.refuses = None
        await system.ready()
        assert (await system.ask(PROMPT)).status == 200
        assert await system.metric("kvrouter_kubernetes_up") == 1
        assert await system.metric("kvrouter_engine_pods") == 1


async def test_the_picker_of_a_pool_names_its_pods(tmp_path: Path, kube: KubeApiServer) -> None:
    port = free_port()
    one, two = engine(ONE, port), engine(TWO, port)
    await kube.put(pool("qwen", port, app="vllm"), pod("one", ONE))
    picker = f"127.0.0.1:{free_port()}"
    options = ("--inference-pool", "qwen", "--endpoint-picker-bind", picker)
    body = {"model": "m", "prompt": PROMPT}
    async with (
        one.started(),
        two.started(),
        serving(tmp_path, options=options) as system,
        grpc.aio.insecure_channel(picker) as channel,
    ):
        await system.serving(1)
        await system.ready()
        assert (await GatewayStream(channel).routed(body))[0] == [one.bind]
        await kube.put(pod("two", TWO))
        await system.serving(2)
        chosen, _ = await GatewayStream(channel).routed(body, allowed=[two.bind])
        assert chosen == [two.bind]
        await kube.terminate("one")

        async def left() -> bool:
            return await registered(system) == {worker_id_of(two.url)}

        await until(left, 60)
        assert (await GatewayStream(channel).routed(body))[0] == [two.bind]
        status, _, _ = await GatewayStream(channel).refused(body, allowed=[one.bind])
        assert status == 503


@pytest.mark.full
async def test_a_state_is_of_one_incarnation_of_a_pod(tmp_path: Path, kube: KubeApiServer) -> None:
    one = engine(ONE, free_port())
    await kube.put(pod("one", ONE))
    options = ("--engine-pods", f"app=vllm:{one.url.rpartition(':')[2]}", "--state", str(tmp_path / "state"))
    async with one.started():
        async with serving(tmp_path, options=options) as system:
            await system.serving(1)
            await system.ask(PROMPT)

            async def indexed() -> bool:
                return all(each.blocks == 8 for each in (await system.ranks()).values())

            await until(indexed, 60)
            assert await system.process.stop(20) == 0
        async with serving(tmp_path, options=options, name="again") as again:
            await again.ready()
            assert await again.metric("kvrouter_relay_restored_blocks") == 8
            assert await again.process.stop(20) == 0
        await kube.put(pod("one", ONE, restarts=1))
        async with serving(tmp_path, options=options, name="restarted") as restarted:
            await restarted.ready()
            assert await restarted.metric("kvrouter_relay_restored_blocks") == 0
            assert restarted.logged("state.not_recovered")
