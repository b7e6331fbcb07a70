"""All workers of a pool are killed and start again: requests wait for them, and no prompt is computed for nothing."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from kvrouter.v1.errors import KvRouterError

from .processes import PATIENCE_SECONDS, Processes, services_ready, start_services, streamed

REQUESTS = 8
PROMPT_TOKENS = 3000
"""Enough that a prefill worker computes the prompt."""
WORKERS = ("mocker-0", "mocker-1")


async def start_worker(processes: Processes, number: int, *options: str) -> None:
    """Starts a worker, whose lease of 60 s outlasts the restart: Schedulers choose it while nobody listens there."""
    named = ("--worker-id", str(number + 1), "--lease-seconds", "60")
    await processes.start("mocker", f"mocker-{number}", *named, *options)


async def prefills(processes: Processes) -> int:
    """Returns how many prompts prefill workers have computed for decode workers."""
    address = processes.directory.services("frontend")["frontend-0"].http_endpoint
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith('kvrouter_frontend_prefills_total{outcome="remote"}')]
    return int(float(found[0].split()[-1])) if found else 0


@pytest.mark.parametrize(
    "is_disaggregated",
    [pytest.param(False, id="aggregated"), pytest.param(True, id="disaggregated", marks=pytest.mark.full)],
)
async def test_requests_wait_for_a_pool_that_restarts(processes: Processes, *, is_disaggregated: bool) -> None:
    # The registry shows each Frontend's own address, where its metrics are.
    processes.where[-2:] = ["--http-bind", "127.0.0.1:0"]
    await start_services(
        processes, schedulers=1, frontends=1, frontend=("--pool-restart-seconds", str(PATIENCE_SECONDS))
    )
    role = ("--role", "decode") if is_disaggregated else ()
    for number in range(2):
        await start_worker(processes, number, *role)
    if is_disaggregated:
        await processes.start("mocker", "mocker-9", "--worker-id", "9", "--role", "prefill", "--component", "prefill")
    await services_ready(processes, schedulers=1, frontends=1, workers=2 + is_disaggregated)
    frontend = processes.frontend("frontend-0")
    assert await streamed(frontend, 0, 3, PROMPT_TOKENS) == 3
    before = await prefills(processes)
    assert before == is_disaggregated
    for name in WORKERS:
        await processes.kill(name)
    async with asyncio.TaskGroup() as group:
        waiting = [group.create_task(streamed(frontend, number + 1, 3, PROMPT_TOKENS)) for number in range(REQUESTS)]
        try:
            for number in range(2):
                await start_worker(processes, number, *role)
            done, _ = await asyncio.wait(waiting, timeout=PATIENCE_SECONDS)
        except KvRouterError as error:
            raise AssertionError(f"a request did not wait for its pool: {error.message}") from None
    assert len(done) == REQUESTS
    assert [each.result() for each in waiting] == [3] * REQUESTS
    if is_disaggregated:
        assert await prefills(processes) <= before + REQUESTS, "no prompt was computed for a decode worker that is away"
