"""Schedulers that sync: the one that takes over has the load already, and what nobody holds any more goes at all."""

from __future__ import annotations

import asyncio
import signal

import pytest
from kvrouter.v1.errors import KvRouterError

from .processes import (
    GRACE_SECONDS,
    PATIENCE_SECONDS,
    SCHEDULERS,
    TOKENS,
    UNSHARDED,
    Processes,
    cancelled,
    start_system,
    streamed,
)
from .rig import FULL

SYNC = ("--replica-sync", "--lease-seconds", "2", "--replica-heartbeat-seconds", "0.2")
ENDLESS_PREFILL = ("--worker-stall-seconds", "0")
"""Keeps a Frontend at workers that generate nothing."""
STREAMS = 500 if FULL else 100


async def until_all_booked(processes: Processes, count: int) -> None:
    for name in SCHEDULERS:
        await processes.until_booked(name, count)


@pytest.mark.full
async def test_the_scheduler_that_takes_over_has_the_load_before_sessions_move(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=SYNC)
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, TOKENS)) for number in range(STREAMS)]
    try:
        await until_all_booked(processes, STREAMS)
        first, second = await processes.deciding(1)
        # The Frontend cannot tell it anything as long as it stands still.
        processes.signal("frontend-0", signal.SIGSTOP)
        await processes.kill(first)
        assert await processes.booked(second) == STREAMS
        processes.signal("frontend-0", signal.SIGCONT)
        late = [asyncio.create_task(streamed(frontend, STREAMS + number, TOKENS)) for number in range(20)]
        running += late
        seen = set[int]()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (booked := await processes.booked(second)) != STREAMS + 20:
                seen.add(booked)
                await asyncio.sleep(0.01)
        assert all(STREAMS <= booked <= STREAMS + 20 for booked in seen), f"a gap, or something twice: {sorted(seen)}"
        assert await asyncio.gather(*running) == [TOKENS] * (STREAMS + 20)
        await processes.until_booked(second, 0)
    finally:
        await cancelled(running)


@pytest.mark.parametrize(
    "with_scheduler",
    [pytest.param(False, id="frontend", marks=pytest.mark.full), pytest.param(True, id="frontend and scheduler")],
)
async def test_bookings_of_a_killed_frontend_are_freed_everywhere(processes: Processes, with_scheduler: bool) -> None:
    await start_system(processes, schedulers=2, frontends=2, clock_factor=0.02, scheduler=SYNC)
    doomed, other = processes.frontend("frontend-0"), processes.frontend("frontend-1")
    lost = [asyncio.create_task(streamed(doomed, number, 1000)) for number in range(STREAMS)]
    kept = [asyncio.create_task(streamed(other, STREAMS + number, 1000)) for number in range(20)]
    try:
        await until_all_booked(processes, STREAMS + 20)
        first, second = await processes.deciding(2)
        await asyncio.gather(processes.kill("frontend-0"), *([processes.kill(first)] if with_scheduler else []))
        outcomes = await asyncio.gather(*lost, return_exceptions=True)
        assert all(isinstance(outcome, KvRouterError) for outcome in outcomes)
        for name in (second,) if with_scheduler else SCHEDULERS:
            await processes.until_booked(name, 20)
        await cancelled(kept)
        for name in (second,) if with_scheduler else SCHEDULERS:
            await processes.until_booked(name, 0)
    finally:
        await cancelled(lost + kept)


@pytest.mark.full
async def test_one_that_is_paused_past_its_lease_and_comes_back_agrees(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=SYNC)
    frontend = processes.frontend("frontend-0")
    running = [asyncio.create_task(streamed(frontend, number, 1500)) for number in range(20)]
    try:
        await until_all_booked(processes, 20)
        first, second = await processes.deciding(1)
        processes.signal(first, signal.SIGSTOP)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await processes.directory.wait_for(lambda seen: first not in seen.services("scheduler"))
        running += [asyncio.create_task(streamed(frontend, 20 + number, 1500)) for number in range(20)]
        await processes.until_booked(second, 40)
        processes.signal(first, signal.SIGCONT)
        await until_all_booked(processes, 40)
        await cancelled(running)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(running)


@pytest.mark.parametrize(
    "sync", [pytest.param((), id="no sync", marks=pytest.mark.full), pytest.param(SYNC, id="sync")]
)
async def test_the_survivor_does_not_herd(processes: Processes, sync: tuple[str, ...]) -> None:
    """One worker has twice the load of the other; what comes after the failover makes up for that, and no more."""
    # No engine computes a first token meanwhile: a request whose prefill has ended costs less than one that waits.
    await start_system(
        processes, schedulers=2, frontends=1, clock_factor=1e-4, mode="kv", frontend=ENDLESS_PREFILL, scheduler=sync
    )
    frontend = processes.frontend("frontend-0")
    many, few = STREAMS, STREAMS // 2
    running = [
        asyncio.create_task(streamed(frontend, number, 1000, worker_id=1 + (number >= many)))
        for number in range(many + few)
    ]
    try:
        first, second = await processes.deciding(1)
        await processes.until_booked(first, many + few)
        assert await processes.requests_by_worker(first) == {1: many, 2: few}
        await processes.kill(first)
        running += [asyncio.create_task(streamed(frontend, many + few + number, 1000)) for number in range(many)]
        await processes.until_booked(second, 2 * many + few)
        found = await processes.requests_by_worker(second)
        # Blind to what was there it would deal evenly; blind to its own, it would send all to one worker.
        assert abs(found[2] - found[1]) <= 0.25 * many, found
        assert found[1] > many, "some went to either"
    finally:
        await cancelled(running)


@pytest.mark.full
async def test_schedulers_that_are_killed_and_join_under_load_agree(processes: Processes) -> None:
    await start_system(processes, schedulers=2, frontends=2, clock_factor=1.0, scheduler=SYNC)
    live, ended, stopping = list(SCHEDULERS), 0, False

    async def churn(place: int) -> None:
        nonlocal ended
        while not stopping:
            assert await streamed(processes.frontend(f"frontend-{place % 2}"), place, 8) == 8
            ended += 1

    async with asyncio.TaskGroup() as group:
        for place in range(10):
            group.create_task(churn(place))
        for number in range(8 if FULL else 3):
            # The deciding one, then the other, and so on: both must have received everything.
            await processes.kill(live.pop(0))
            live.append(f"scheduler-{number + 2}")
            options = ("--session-grace-seconds", str(GRACE_SECONDS), *UNSHARDED)
            await processes.start("scheduler", live[-1], *options, "--router-mode", "round-robin", *SYNC)
            await processes.ready("scheduler", live[-1])
            before = ended
            async with asyncio.timeout(PATIENCE_SECONDS):
                while ended < before + 20 or not await knows_all(processes, live):
                    await asyncio.sleep(0.05)
        stopping = True
    kept = [asyncio.create_task(streamed(processes.frontend("frontend-0"), number, 1000)) for number in range(20)]
    try:
        for count in (20, 0):
            for name in live:
                await processes.until_booked(name, count)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len({await digests(processes, name, live) for name in live}) > 1:
                    await asyncio.sleep(0.05)
            await cancelled(kept)
    finally:
        await cancelled(kept)


async def knows_all(processes: Processes, names: list[str]) -> bool:
    """Whether each has the whole state of every other."""
    known = [
        {each.scheduler_id for each in (await processes.status(name)).components[0].replicas if each.complete}
        for name in names
    ]
    return all(set(names) <= each for each in known)


async def digests(processes: Processes, name: str, live: list[str]) -> frozenset[tuple[str, int, int, int]]:
    """What a Scheduler knows of those that live: (id, next sequence, bookings, digest)."""
    replicas = (await processes.status(name)).components[0].replicas
    return frozenset(
        (each.scheduler_id, each.next_sequence, each.bookings, each.digest)
        for each in replicas
        if each.scheduler_id in live
    )
