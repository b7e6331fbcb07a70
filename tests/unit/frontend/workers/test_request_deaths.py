"""Requests that wait, since a further worker could be the third to die of their prompt."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.frontend.workers.failures import WorkerFailure, WorkerFate
from kvrouter.frontend.workers.poison_prompts import PoisonPrompts, RequestDeaths
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import DeadlineExceeded, PoisonPrompt

PROMPT = b"1234"
NEVER = Deadline(None)


class Probed:
    """Workers that answer probes or do not."""

    def __init__(self, *living: str) -> None:
        self.living = set(living)
        self.asked: list[str] = []

    async def answers(self, endpoint: str) -> bool:
        self.asked.append(endpoint)
        return endpoint in self.living


def failed(endpoint: str, cause: str = "UNAVAILABLE", *, died: bool = False) -> tuple[WorkerFailure, WorkerFate]:
    fate = WorkerFate(f"{endpoint} 1", 0, died=died)
    return WorkerFailure(int(endpoint[1:]), cause, "it failed", fate=fate), fate


def of(prompts: PoisonPrompts) -> RequestDeaths:
    return RequestDeaths(prompts, "", "m", PROMPT)


async def waits(deaths: RequestDeaths, probed: Probed) -> asyncio.Task[None]:
    """Returns the settling of a request that has waited for some probes."""
    settling = asyncio.create_task(deaths.settle(probed.answers, NEVER))
    seen = len(probed.asked)
    while len(probed.asked) < seen + 3 and not settling.done():
        await asyncio.sleep(0)
    assert not settling.done()
    return settling


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.frontend.workers.poison_prompts._PAUSE_SECONDS", 0)


@pytest.mark.parametrize("cause", ["silent", "stalled", "UNAVAILABLE", "unfinished"])
async def test_a_worker_that_was_left_may_be_the_second_to_die(cause: str) -> None:
    """The request left it, died at another one, and must not go to a third while the first may still read it."""
    deaths, probed = of(PoisonPrompts(60)), Probed()
    left, fate = failed("w1", cause)
    deaths.add(left)
    await deaths.settle(probed.answers, NEVER)
    deaths.add(failed("w2", died=True)[0])
    settling = await waits(deaths, probed)
    fate.resolve(died=True)
    with pytest.raises(PoisonPrompt):
        await settling


async def test_a_worker_that_answers_probes_again_has_survived() -> None:
    deaths, probed = of(PoisonPrompts(60)), Probed()
    deaths.add(failed("w1", "silent")[0])
    deaths.add(failed("w2", died=True)[0])
    settling = await waits(deaths, probed)
    asked = len(probed.asked)
    probed.living.add("w1")
    await settling
    assert len(probed.asked) == asked + 2, "the first answer may have been ahead of the request"


async def test_errors_of_workers_that_live_cost_two_probes_each() -> None:
    deaths, probed = of(PoisonPrompts(60)), Probed("w1", "w2")
    for worker in ("w1", "w2"):
        deaths.add(failed(worker, "INTERNAL")[0])
    await deaths.settle(probed.answers, NEVER)
    assert sorted(probed.asked) == ["w1", "w1", "w2", "w2"]


async def test_the_deadline_ends_the_wait() -> None:
    deaths = of(PoisonPrompts(60))
    deaths.add(failed("w1", "silent")[0])
    deaths.add(failed("w2", died=True)[0])
    with pytest.raises(DeadlineExceeded, match="whether workers died"):
        await deaths.settle(Probed().answers, Deadline.after(0))


async def test_clients_that_leave_hung_workers_and_try_again_wait() -> None:
    """Each request ends by its client's deadline, and the next one knows of its worker."""
    prompts = PoisonPrompts(60)
    fates = []
    for worker in ("w1", "w2"):
        deaths = of(prompts)
        await deaths.settle(Probed().answers, NEVER)
        fate = failed(worker)[1]
        fates.append(fate)
        deaths.abandon(fate)
        deaths.end(survived=False)
    settling = await waits(of(prompts), Probed())
    for fate in fates:
        fate.resolve(died=True)
    with pytest.raises(PoisonPrompt):
        await settling


async def test_after_a_death_one_request_at_a_time_runs_the_prompt() -> None:
    """Two at once could be the second and the third death."""
    prompts = PoisonPrompts(60)
    first, second = of(prompts), of(prompts)
    first.add(failed("w1", died=True)[0])
    await first.settle(Probed().answers, NEVER)
    settling = asyncio.create_task(second.settle(Probed().answers, NEVER))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not settling.done()
    first.add(failed("w2", died=True)[0])
    first.end(survived=False)
    with pytest.raises(PoisonPrompt):
        await settling


async def test_a_prompt_that_ran_to_its_end_runs_several_times_at_once_again() -> None:
    prompts = PoisonPrompts(60)
    first, second, third = of(prompts), of(prompts), of(prompts)
    first.add(failed("w1", died=True)[0])
    await first.settle(Probed().answers, NEVER)
    settling = asyncio.create_task(second.settle(Probed().answers, NEVER))
    await asyncio.sleep(0)
    first.end(survived=True)
    await settling
    await third.settle(Probed().answers, NEVER)
    third.add(failed("w2", died=True)[0])
    with pytest.raises(PoisonPrompt):
        await second.settle(Probed().answers, NEVER)
