"""Work of clients: owners take turns of a slice, and what waits is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from threading import Event

import pytest
from kvrouter.frontend.text import client_work
from kvrouter.frontend.text.client_work import SLICE, ClientWork, FairTurns, Lane, Owner, Slices
from kvrouter.v1.errors import Overloaded, RateLimited
from prometheus_client import CollectorRegistry

FLOOD, QUIET = Owner("flood"), Owner("quiet")
OWNER = ContextVar("owner", default=FLOOD)


class Work:
    """The threads, whose slices are recorded."""

    def __init__(self) -> None:
        self.threads = ClientWork(CollectorRegistry(), OWNER.get)
        self.ran: list[str] = []

    def start(self, owner: Owner, name: str, slices: int, before: Callable[[], object] = bool) -> asyncio.Task[str]:
        def job() -> Slices[str]:
            for number in range(slices):
                if number:
                    yield
                before()
                self.ran.append(name)
            return name

        OWNER.set(owner)
        return asyncio.create_task(self.threads.run_slices(job(), Lane.LONG_TEXTS, size=slices * SLICE))


@pytest.fixture
async def work() -> AsyncIterator[Work]:
    made = Work()
    yield made
    made.threads.close()


@pytest.mark.parametrize(("flooding_jobs", "slices"), [(200, 1), (4, 100)])
async def test_a_flood_of_one_owner_delays_another_by_a_slice_for_each_of_its_own(
    work: Work, flooding_jobs: int, slices: int
) -> None:
    gate = Event()
    flood = [work.start(FLOOD, "flood", slices, gate.wait) for _ in range(flooding_jobs)]
    await asyncio.sleep(0)
    quiet = work.start(QUIET, "quiet", 2)
    await asyncio.sleep(0)
    gate.set()
    assert await quiet == "quiet"
    assert work.ran.index("quiet") <= 2
    last = len(work.ran) - 1 - work.ran[::-1].index("quiet")
    assert last <= 5
    await asyncio.gather(*flood)


async def test_an_owner_with_more_weight_gets_more_turns(work: Work) -> None:
    gate = Event()
    jobs = [work.start(FLOOD, "one", 60, gate.wait), work.start(Owner("heavy", 3.0), "three", 60, gate.wait)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*jobs)
    assert 40 <= work.ran[:60].count("three") <= 50


async def test_jobs_of_one_owner_run_one_after_the_other(work: Work) -> None:
    jobs = [work.start(FLOOD, str(number), 3) for number in range(4)]
    await asyncio.gather(*jobs)
    assert work.ran == sorted(work.ran)


async def test_what_waits_is_bounded_for_an_owner_and_in_sum(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_work, "MAX_OWNER_WORK", 10 * SLICE)
    gate = Event()
    flood = [work.start(FLOOD, "flood", 4, gate.wait) for _ in range(3)]
    with pytest.raises(RateLimited):
        await flood[2]
    assert await work.threads.run(lambda: 1, Lane.BODIES, size=1) == 1
    work.threads._work.most = 12 * SLICE
    with pytest.raises(Overloaded):
        await work.start(QUIET, "quiet", 5)
    gate.set()
    await asyncio.gather(*flood[:2])
    assert await work.start(FLOOD, "again", 3) == "again"
    assert work.threads._work.used == 0
    assert not work.threads._by_owner


async def test_a_cancelled_job_leaves_nothing_behind(work: Work) -> None:
    gate = Event()
    running = work.start(FLOOD, "running", 2, gate.wait)
    await asyncio.sleep(0)
    waiting = [work.start(FLOOD, "waiting", 2) for _ in range(10)]
    await asyncio.sleep(0)
    for each in (*waiting, running):
        each.cancel()
    await asyncio.wait([*waiting, running])
    gate.set()
    assert await work.start(FLOOD, "next", 1) == "next"
    assert "waiting" not in work.ran
    assert len(work.threads._lanes[Lane.LONG_TEXTS]._waiting) == 0
    assert work.threads._work.used == 0


async def test_an_error_reaches_its_caller_only(work: Work) -> None:
    def fail() -> None:
        raise ValueError("no")

    other = work.start(FLOOD, "other", 2)
    with pytest.raises(ValueError, match="no"):
        await work.threads.run(fail, Lane.LONG_TEXTS, size=1)
    assert await other == "other"


def test_an_owner_gains_nothing_from_having_been_idle() -> None:
    turns: FairTurns[str] = FairTurns()
    for number in range(20):
        turns.add(FLOOD, f"flood {number}")
    taken = []
    for _ in range(10):
        job = turns.take()
        assert job is not None
        turns.charge(FLOOD, 100)
        turns.end(FLOOD, job, again=False)
    for number in range(5):
        turns.add(QUIET, f"quiet {number}")
    for _ in range(10):
        job = turns.take()
        assert job is not None
        owner = FLOOD if job.startswith("flood") else QUIET
        turns.charge(owner, 100)
        turns.end(owner, job, again=False)
        taken.append(owner.name)
    assert taken.count("quiet") == 5
    assert taken[:4].count("quiet") == 2
