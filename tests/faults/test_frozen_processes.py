"""Processes that freeze and go on: clients lose nothing, and no Scheduler keeps load that has ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import pytest
from kvrouter.devtools.system.servers import EtcdServer

from .processes import PATIENCE_SECONDS, SCHEDULERS, Processes, cancelled, start_system, streamed, system
from .rig import FULL

STREAMS = 200 if FULL else 40
HEARTBEAT_TIMEOUT = 0.4
"""Of the Frontends, seconds. Freezes last as long as it takes to see what they are to cause."""
FRONTEND = ("--scheduler-heartbeat-timeout-seconds", str(HEARTBEAT_TIMEOUT))
LEASE_SECONDS = 2
# A Scheduler that comes back still has its former bookings: their grace has not ended.
SCHEDULER = ("--lease-seconds", str(LEASE_SECONDS), "--session-grace-seconds", "5")
SYNC = ("--replica-sync", "--replica-heartbeat-seconds", "0.2")
WITH_AND_WITHOUT_SYNC = pytest.mark.parametrize(
    "sync", [pytest.param((), id="no sync", marks=pytest.mark.full), pytest.param(SYNC, id="sync")]
)
WITHOUT_AND_WITH_SYNC = pytest.mark.parametrize(
    "sync", [pytest.param((), id="no sync"), pytest.param(SYNC, id="sync", marks=pytest.mark.full)]
)


@pytest.fixture
async def system_with_own_etcd(nats_url: str, own_etcd: EtcdServer, namespace: str) -> AsyncIterator[Processes]:
    async with system(nats_url, own_etcd.endpoint, namespace) as processes:
        yield processes


@contextmanager
def frozen(processes: Processes, name: str) -> Iterator[None]:
    processes.signal(name, signal.SIGSTOP)
    try:
        yield
    finally:
        processes.signal(name, signal.SIGCONT)


class Load:
    """Streams through a Frontend: short ones come and go, and those that are long stay."""

    def __init__(self, processes: Processes, frontend: str = "frontend-0") -> None:
        self._frontend = processes.frontend(frontend)
        self._number = 0
        self.running: list[asyncio.Task[int]] = []

    def start(self, count: int, tokens: int, prompt_tokens: int = 40) -> list[asyncio.Task[int]]:
        numbers = range(self._number, self._number + count)
        self._number += count
        started = [asyncio.create_task(streamed(self._frontend, number, tokens, prompt_tokens)) for number in numbers]
        self.running += started
        return started

    async def ended(self, streams: list[asyncio.Task[int]], tokens: int) -> None:
        """Waits for streams; each has got all of its tokens, so that its client saw OK."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await asyncio.gather(*streams) == [tokens] * len(streams)


async def until_all_booked(processes: Processes, count: int) -> None:
    for name in SCHEDULERS:
        await processes.until_booked(name, count)


async def until_booked_in_sum(processes: Processes, count: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum([await processes.booked(name) for name in SCHEDULERS]) != count:
            await asyncio.sleep(0.05)


async def until_session(processes: Processes, name: str) -> None:
    """Waits until the session of the Frontend is open at a Scheduler, and requests go there."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (await processes.status(name)).sessions:
            await asyncio.sleep(0.02)


async def until_absent(processes: Processes, name: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await processes.directory.wait_for(lambda seen: name not in seen.services("scheduler"))


async def until_present(processes: Processes, name: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        await processes.directory.wait_for(lambda seen: name in seen.services("scheduler"))


@WITH_AND_WITHOUT_SYNC
async def test_a_scheduler_that_is_frozen_beyond_its_lease_comes_back_to_the_load_that_is_left(
    processes: Processes, sync: tuple[str, ...]
) -> None:
    await start_system(
        processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=(*SCHEDULER, *sync), frontend=FRONTEND
    )
    load = Load(processes)
    try:
        first, second = await processes.deciding(1)
        ending, staying = load.start(STREAMS, 60), load.start(10, 1500)
        await processes.until_booked(first, STREAMS + 10)
        with frozen(processes, first):
            await until_session(processes, second)
            staying += load.start(10, 1500)
            await load.ended(load.start(10, 2), 2)
            await load.ended(ending, 60)
            await until_absent(processes, first)
        await until_present(processes, first)
        # It decides again, and had the ended ones on its list.
        await processes.until_booked(first, 20)
        await load.ended(load.start(10, 2), 2)
        await processes.until_booked(first, 20)
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(load.running)


@pytest.mark.full
@WITHOUT_AND_WITH_SYNC
async def test_a_scheduler_that_is_frozen_short_of_its_lease_delays_requests_by_heartbeats_only(
    processes: Processes, sync: tuple[str, ...], record_property: Callable[[str, object], None]
) -> None:
    # Nothing but missed heartbeats can move the session: the lease outlives the test.
    scheduler = (*SCHEDULER, "--lease-seconds", "300", *sync)
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=scheduler, frontend=FRONTEND)
    load = Load(processes)
    try:
        first, second = await processes.deciding(1)
        ending, staying = load.start(STREAMS, 60), load.start(10, 1500)
        await processes.until_booked(first, STREAMS + 10)
        with frozen(processes, first):
            began = time.monotonic()
            await load.ended(load.start(10, 2), 2)
            record_property("seconds until requests ended", round(time.monotonic() - began, 2))
            await load.ended(ending, 60)
            await processes.until_booked(second, 10)
        await load.ended(load.start(10, 2), 2)
        await processes.until_booked(second, 10)
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(load.running)


@pytest.mark.full
async def test_requests_wait_for_the_only_scheduler(processes: Processes) -> None:
    await start_system(processes, schedulers=1, frontends=1, clock_factor=0.1, scheduler=SCHEDULER, frontend=FRONTEND)
    load = Load(processes)
    try:
        ending, staying = load.start(STREAMS, 60), load.start(10, 1500)
        await processes.until_booked("scheduler-0", STREAMS + 10)
        with frozen(processes, "scheduler-0"):
            waiting = load.start(10, 2)
            await load.ended(ending, 60)
            await until_absent(processes, "scheduler-0")
            assert not any(stream.done() for stream in waiting)
        await load.ended(waiting, 2)
        await processes.until_booked("scheduler-0", 10)
        await cancelled(staying)
        await processes.until_booked("scheduler-0", 0)
    finally:
        await cancelled(load.running)


@pytest.mark.full
async def test_a_frozen_scheduler_of_sharded_requests_returns_to_the_remaining_load(processes: Processes) -> None:
    await start_system(
        processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=SCHEDULER, frontend=(*FRONTEND, "--sharding")
    )
    load = Load(processes)
    try:
        ending, staying = load.start(STREAMS, 60), load.start(STREAMS, 1500)
        await until_booked_in_sum(processes, 2 * STREAMS)
        before = await processes.booked("scheduler-0")
        assert 0 < before < 2 * STREAMS, "requests are split"
        with frozen(processes, "scheduler-0"):
            await load.ended(ending, 60)
            await until_absent(processes, "scheduler-0")
            await processes.until_booked("scheduler-1", STREAMS)
        await until_present(processes, "scheduler-0")
        await until_booked_in_sum(processes, STREAMS)
        assert await processes.booked("scheduler-0") > 0, "its share has come back"
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(load.running)


@pytest.mark.full
async def test_requests_that_are_queued_at_a_frozen_scheduler_are_queued_at_the_other(processes: Processes) -> None:
    await start_system(
        processes,
        schedulers=2,
        frontends=1,
        clock_factor=1.0,
        mode="forecast",
        engine=("--num-blocks", "80"),
        scheduler=SCHEDULER,
        frontend=FRONTEND,
    )
    load = Load(processes)
    try:
        first, second = await processes.deciding(1)
        streams = load.start(16, 100, 320)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await processes.queued(first)).requests:
                await asyncio.sleep(0.02)
        with frozen(processes, first):
            await load.ended(streams, 100)
            await until_absent(processes, first)
        await until_present(processes, first)
        await load.ended(load.start(2, 10), 10)
        await until_all_booked(processes, 0)
        assert [(await processes.queued(name)).requests for name in (first, second)] == [0, 0]
    finally:
        await cancelled(load.running)


@pytest.mark.full
@WITH_AND_WITHOUT_SYNC
async def test_an_etcd_that_is_frozen_until_leases_end_costs_no_request_and_no_booking(
    system_with_own_etcd: Processes, own_etcd: EtcdServer, sync: tuple[str, ...]
) -> None:
    processes = system_with_own_etcd
    await start_system(
        processes, schedulers=2, frontends=1, clock_factor=0.1, scheduler=(*SCHEDULER, *sync), frontend=FRONTEND
    )
    load = Load(processes)
    try:
        staying = load.start(10, 1500)
        for _ in range(4 if FULL else 1):
            ending = load.start(STREAMS, 20)
            own_etcd.pause()
            leases_end = asyncio.get_running_loop().time() + 1.5 * LEASE_SECONDS
            await load.ended(ending, 20)
            while asyncio.get_running_loop().time() < leases_end:
                await load.ended(load.start(STREAMS, 20), 20)
            own_etcd.resume()
            await load.ended(load.start(STREAMS, 20), 20)
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        own_etcd.resume()
        await cancelled(load.running)


@pytest.mark.full
@WITHOUT_AND_WITH_SYNC
async def test_a_frozen_frontend_goes_on_with_the_bookings_that_it_has(
    processes: Processes, sync: tuple[str, ...]
) -> None:
    await start_system(
        processes, schedulers=2, frontends=2, clock_factor=0.1, scheduler=(*SCHEDULER, *sync), frontend=FRONTEND
    )
    load, other = Load(processes), Load(processes, "frontend-1")
    try:
        first, _ = await processes.deciding(2)
        ending, staying = load.start(STREAMS, 30), load.start(10, 1500)
        await processes.until_booked(first, STREAMS + 10)
        with frozen(processes, "frontend-0"):
            # The deciding Scheduler freezes and comes back meanwhile: the other Frontend goes away and returns.
            with frozen(processes, first):
                await other.ended(other.start(10, 30), 30)
                await until_absent(processes, first)
            await until_present(processes, first)
            await other.ended(other.start(10, 30), 30)
        await load.ended(ending, 30)
        await processes.until_booked(first, 10)
        await load.ended(load.start(10, 2), 2)
        await processes.until_booked(first, 10)
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(load.running + other.running)


@pytest.mark.full
@WITH_AND_WITHOUT_SYNC
async def test_the_load_of_a_frontend_that_stays_frozen_goes_and_comes_back_with_it(
    processes: Processes, sync: tuple[str, ...]
) -> None:
    scheduler = ("--lease-seconds", str(LEASE_SECONDS), "--session-grace-seconds", "1", *sync)
    await start_system(processes, schedulers=2, frontends=1, clock_factor=0.02, scheduler=scheduler, frontend=FRONTEND)
    load = Load(processes)
    try:
        staying = load.start(STREAMS, 1500)
        first, _ = await processes.deciding(1)
        await processes.until_booked(first, STREAMS)
        with frozen(processes, "frontend-0"):
            await until_all_booked(processes, 0)
        await processes.until_booked(first, STREAMS)
        await load.ended(load.start(10, 2), 2)
        await processes.until_booked(first, STREAMS)
        await cancelled(staying)
        await until_all_booked(processes, 0)
    finally:
        await cancelled(load.running)
