"""The order in which pools of one model are tried."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest
from kvrouter.frontend.schedulers.link_pool import PoolChoice, SchedulerLinks
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.errors import AllBusy, DependencyAway
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest, SelectWorkerResponse

Answer = SelectWorkerResponse | Exception


class Schedulers:
    """Answers for each component by its name."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[SelectWorkerRequest] = []
        self._answers = answers

    def scheduler(self, component: ComponentName) -> Scheduler:
        return Scheduler(self, self._answers[component.name])


class Scheduler:
    def __init__(self, schedulers: Schedulers, answer: Answer) -> None:
        self._schedulers, self._answer = schedulers, answer

    async def select_worker(self, request: SelectWorkerRequest, *, deadline: Deadline) -> SelectWorkerResponse:
        self._schedulers.asked.append(request)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


def pool(name: str, workers: int = 1) -> ComponentView:
    registered = {number: WorkerRegistration(worker_id=number) for number in range(workers)}
    return ComponentView(ComponentName("ns", name), ComponentDescriptor(), registered)


async def order(answers: dict[str, Answer]) -> list[str]:
    choice = PoolChoice(cast(SchedulerLinks, Schedulers(answers)), Random(1))
    pools = [pool(name) for name in answers]
    found = await choice.cheapest_first(pools, lambda _: RoutingRequest(), Deadline.after(10))
    return [view.name.name for view in found]


@pytest.mark.parametrize("reverse", [False, True])
async def test_room_comes_before_the_cost_and_the_cost_before_a_conversation(*, reverse: bool) -> None:
    answers: dict[str, Answer] = {
        "conversation": SelectWorkerResponse(cost=10.0, keeps_conversation=True),
        "as-cheap": SelectWorkerResponse(cost=10.0),
        "dear": SelectWorkerResponse(cost=20.0, keeps_conversation=True),
        "full": SelectWorkerResponse(cost=1.0, would_queue=True, keeps_conversation=True),
    }
    expected = list(answers)
    given = dict(reversed(answers.items())) if reverse else answers
    assert await order(given) == expected


async def test_pools_that_cannot_serve_the_request_come_last() -> None:
    found = await order({"busy": AllBusy(1000), "away": DependencyAway("gone"), "dear": SelectWorkerResponse(cost=1e9)})
    assert found[0] == "dear"
    assert sorted(found[1:]) == ["away", "busy"]


async def test_no_scheduler_is_asked_about_a_single_pool() -> None:
    schedulers = Schedulers({})
    choice = PoolChoice(cast(SchedulerLinks, schedulers))
    only = pool("only")
    assert await choice.cheapest_first([only], lambda _: RoutingRequest(), Deadline.after(10)) == [only]
    assert await choice.cheapest_first([], lambda _: RoutingRequest(), Deadline.after(10)) == []


async def test_equal_costs_share_requests_in_proportion_to_the_workers() -> None:
    schedulers = Schedulers({"large": SelectWorkerResponse(cost=1.0), "small": SelectWorkerResponse(cost=1.0)})
    choice = PoolChoice(cast(SchedulerLinks, schedulers), Random(1))
    pools = [pool("small", 1), pool("large", 3)]
    chosen = [
        (await choice.cheapest_first(pools, lambda _: RoutingRequest(), Deadline.after(10)))[0].name.name
        for _ in range(400)
    ]
    assert chosen.count("large") == pytest.approx(300, abs=40)
    assert all(request.compares and not request.HasField("booking") for request in schedulers.asked)
