"""Load survives what kills processes: a Frontend's goes with it, a Scheduler's moves to another, exactly."""

from __future__ import annotations

import asyncio
import time

import pytest
from kvrouter.v1.errors import KvRouterError

from .processes import PATIENCE_SECONDS, TOKENS, Processes, cancelled, start_system, streamed
from .rig import FULL

STREAMS = 500
FEWER = STREAMS if FULL else 100
"""Streams of the scenarios whose length is that of their streams."""


async def test_the_load_of_a_killed_frontend_goes_and_no_other(processes: Processes) -> None:
    await start_system(processes, schedulers=1, frontends=2, clock_factor=0.02)
    doomed, other = processes.frontend("frontend-0"), processes.frontend("frontend-1")
    lost = [asyncio.create_task(streamed(doomed, number, 1000)) for number in range(STREAMS)]
    kept = [asyncio.create_task(streamed(other, STREAMS + number, 1000)) for number in range(20)]
    try:
        await processes.until_booked("scheduler-0", STREAMS + 20)
        await processes.kill("frontend-0")
        outcomes = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(outcome, KvRouterError) for outcome in outcomes)
        # All of it goes in one step, and until then all of it counts.
        assert await processes.until_booked("scheduler-0", 20) <= {STREAMS + 20, 20}
        await cancelled(kept)
        await processes.until_booked("scheduler-0", 0)
    finally:
        await cancelled(lost + kept)


async def test_the_load_of_a_killed_scheduler_moves_whole_and_no_request_is_lost(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.1)
    frontend = processes.frontend("frontend-0")
    first, second = await processes.deciding(1)
    running = [asyncio.create_task(streamed(frontend, number, TOKENS)) for number in range(FEWER)]
    try:
        await processes.until_booked(first, FEWER)
        assert await processes.booked(second) == 0, "replicas do not share this component"
        await processes.kill(first)
        late = [asyncio.create_task(streamed(frontend, FEWER + number, TOKENS)) for number in range(20)]
        running += late
        assert max(await processes.until_booked(second, FEWER + 20)) == FEWER + 20, "none is counted twice"
        assert await asyncio.gather(*running) == [TOKENS] * (FEWER + 20)
        await processes.until_booked(second, 0)
    finally:
        await cancelled(running)


@pytest.mark.full
async def test_a_frontend_and_its_scheduler_killed_at_once_leave_nothing(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=2, clock_factor=0.02)
    doomed, other = processes.frontend("frontend-0"), processes.frontend("frontend-1")
    running = [asyncio.create_task(streamed(doomed, number, 1000)) for number in range(FEWER)]
    running += [asyncio.create_task(streamed(other, FEWER + number, 1000)) for number in range(5)]
    try:
        first, second = await processes.deciding(2)
        await processes.until_booked(first, FEWER + 5)
        await asyncio.gather(processes.kill("frontend-0"), processes.kill(first))
        assert max(await processes.until_booked(second, 5)) == 5, "it never had those of the killed"
        await cancelled(running)
        await processes.until_booked(second, 0)
    finally:
        await cancelled(running)


@pytest.mark.full
async def test_requests_queued_at_a_killed_scheduler_keep_their_arrival_at_the_next_one(processes: Processes) -> None:
    engine = ("--num-blocks", "80")
    await start_system(processes, schedulers=2, frontends=1, clock_factor=1.0, mode="forecast", engine=engine)
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, 100, 320)) for number in range(16)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(held := [(await processes.queued(f"scheduler-{number}")).requests for number in range(2)]):
                await asyncio.sleep(0.02)
        first, second = ("scheduler-0", "scheduler-1") if held[0] else ("scheduler-1", "scheduler-0")
        seen = time.monotonic()
        await processes.kill(first)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                asked = time.monotonic()
                if (moved := await processes.queued(second)).requests:
                    break
                await asyncio.sleep(0.02)
        assert moved.oldest_age_ms >= (asked - seen) * 1e3, "they had arrived before they were seen to wait"
        assert await asyncio.gather(*running) == [100] * 16
        await processes.until_booked(second, 0)
        assert (await processes.queued(second)).requests == 0
    finally:
        await cancelled(running)


@pytest.mark.full
async def test_the_sharded_load_of_a_killed_scheduler_moves_to_the_other(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.1, frontend=("--sharding",))
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, TOKENS)) for number in range(100)]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while sum(booked := [await processes.booked(f"scheduler-{number}") for number in range(2)]) != 100:
                await asyncio.sleep(0.05)
        assert min(booked) > 0, "requests are split"
        await processes.kill("scheduler-0")
        await processes.until_booked("scheduler-1", 100)
        assert await asyncio.gather(*running) == [TOKENS] * 100
        await processes.until_booked("scheduler-1", 0)
    finally:
        await cancelled(running)
