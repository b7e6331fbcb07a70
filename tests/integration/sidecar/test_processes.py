"""What happens when an engine, a sidecar or both die."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .system import BLOCK, Completion, System, running_system

pytestmark = pytest.mark.timeout(180)

PROMPT = list(range(1, 400))


@pytest.fixture
async def system(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(tmp_path, nats_url, etcd_endpoint, namespace) as system:
        yield system


async def repeated_until_cached(system: System, prompt: list[int]) -> Completion:
    """Runs a prompt again until the index knows its blocks, and returns that run, at an engine that has them."""
    served = set()
    async with asyncio.timeout(60):
        while not (completion := await system.complete(prompt)).overlap_blocks:
            served.add(completion.worker_id)
    assert not served or completion.worker_id in served
    assert completion.cached_tokens == completion.overlap_blocks * BLOCK == (len(prompt) - 1) // BLOCK * BLOCK
    return completion


@pytest.mark.full
async def test_requests_go_to_the_engine_that_has_their_prefix_and_survive_deaths(system: System) -> None:
    """One system for the whole story, because starting it takes most of the time."""
    holder = (await repeated_until_cached(system, PROMPT)).worker_id
    # Of a wholly cached prompt the last block is computed again.
    await repeated_until_cached(system, list(range(1000, 1000 + 25 * BLOCK)))

    # The sidecar dies and resumes. (A worker whose engine has published nothing yet has nothing to resume from.)
    await system.until_saved(holder, len(PROMPT) // BLOCK)
    await system.kill("sidecar")
    await system.start("sidecar")
    await system.until_logged("sidecar", "worker.serving", 4)
    restarted = system.logged("sidecar", "worker.serving")[2:]
    assert [entry["resumed"] for entry in restarted if entry["worker_id"] == holder] == [True]
    await repeated_until_cached(system, PROMPT)

    # The engine dies while it serves: the request is served by the other one, as are the next ones.
    for number in (1, 2):
        system.signal(f"engine-{number}", signal.SIGSTOP)
    async with asyncio.TaskGroup() as tasks:
        request = tasks.create_task(system.complete(PROMPT))
        async with asyncio.timeout(60):
            while not (serving := await system.serving()):
                await asyncio.sleep(0.01)
        (holder,) = serving
        await system.kill(f"engine-{holder}")
        system.signal(f"engine-{3 - holder}", signal.SIGCONT)
    assert request.result().worker_id == 3 - holder

    # It comes back empty, and is used again.
    await system.kill(f"engine-{3 - holder}")
    await system.start(f"engine-{holder}")
    back = await system.complete(PROMPT)
    assert back.worker_id == holder
    assert not back.cached_tokens
    await repeated_until_cached(system, PROMPT)
