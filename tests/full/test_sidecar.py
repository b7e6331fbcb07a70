"""A sidecar passes the conformance kit, and serves on while it and its engines die again and again."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvrouter.v1.worker_pb2 import FinishReason

from ..integration.sidecar.rig import EngineServer, beside, sglang, vllm
from ..integration.sidecar.system import Completion, running_system

KILLS = 20


@pytest.mark.parametrize("server", [vllm, sglang])
async def test_a_sidecar_passes_the_conformance_kit(
    server: Callable[..., EngineServer], namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    options: dict[str, Any] = {"dp_size": 2, "num_blocks": 16_384, "block_size": 16}
    engine = server(enable_prompt_tokens_details=True, **options)
    async with engine.started(), beside(namespace, etcd_endpoint, nats_url, engine.url, load_seconds=0.3) as sidecar:
        await sidecar.ready()
        check = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.devtools.conformance", "--worker", sidecar.worker.endpoint),
            *("--component", f"{namespace}/workers", "--etcd", etcd_endpoint, "--nats", nats_url),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await check.communicate()
    assert check.returncode == 0, output.decode()
    assert " 0 failed" in output.decode().splitlines()[-1]


@pytest.mark.timeout(600)
async def test_requests_are_served_again_after_each_death_of_an_engine_or_the_sidecar(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    rng = random.Random(5)
    async with running_system(tmp_path, nats_url, etcd_endpoint, namespace) as system:
        await system.complete(list(range(1, 100)))
        answers: list[Completion] = []
        ended = False

        async def send() -> None:
            while not ended:
                length = rng.randrange(20, 600)
                answers.append(await system.complete(list(range(1, length)), max_tokens=rng.randrange(1, 60)))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(4):
                tasks.create_task(send())
            for _ in range(KILLS):
                victim = rng.choice(["engine-1", "engine-2", "sidecar"])
                served = len(answers)
                await system.kill(victim)
                await system.start(victim)
                while len(answers) < served + 20:
                    await asyncio.sleep(0.05)
            ended = True
    assert {each.worker_id for each in answers} == {1, 2}
    ends = {FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP}
    assert {each.finish_reason for each in answers} <= ends
    assert all(each.tokens for each in answers)
