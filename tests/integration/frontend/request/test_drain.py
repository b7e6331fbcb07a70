"""A drained worker gets no new requests; its running ones end, or continue elsewhere after the time given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from kvrouter.cli.drain import drain, undrain
from kvrouter.cli.errors import CommandFailed
from kvrouter.cli.top.sources import Where
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import AvoidedWorker, Component, RoutingConstraints
from kvrouter.v1.errors import NotFound, UnknownWorker
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse
from kvrouter.v1.scheduler_pb2 import DrainWorkerRequest, UndrainWorkerRequest
from kvrouter.v1.worker_pb2 import SamplingOptions, StopConditions

from ....waiting import until
from ..gateway import System, request, running_system

DRAINED, OTHER = 1, 2


@pytest.fixture
async def system(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[System]:
    async with running_system(nats_url, etcd_endpoint, namespace, schedulers=2) as found:
        for worker_id in (DRAINED, OTHER):
            await found.start_worker(worker_id, clock_factor=1.0)
        yield found


def component(system: System) -> Component:
    return next(iter(system.runtime.directory.components.values())).descriptor.component


async def until_draining(system: System, worker_id: int, draining: bool = True) -> None:
    """Returns when the Frontend knows it, and no Scheduler has the worker as a candidate, or each has."""
    view = lambda: next(iter(system.runtime.directory.components.values()))  # noqa: E731
    await until(lambda: view().workers[worker_id].draining == draining)
    async with asyncio.timeout(30):
        while any([(worker_id in await system.loads(each)) == draining for each in system.schedulers]):
            await asyncio.sleep(0.01)


def tokens_of(pieces: list[FrontendServiceGenerateResponse]) -> list[int]:
    return [token for each in pieces for token in each.output.token_ids]


async def test_a_drained_worker_gets_no_new_requests_until_it_is_undrained(system: System) -> None:
    for scheduler in system.schedulers:  # Either Scheduler may be asked, and again.
        await scheduler.drain_worker(
            DrainWorkerRequest(component=component(system), worker_id=DRAINED), deadline=Deadline.after(10)
        )
    await until_draining(system, DRAINED)
    for _ in range(4):
        pieces = [each async for each in system.client.generate(request(), deadline=Deadline.after(30))]
        assert pieces[0].routing.rank.worker_id == OTHER
    answer = await system.scheduler.undrain_worker(
        UndrainWorkerRequest(component=component(system), worker_id=DRAINED), deadline=Deadline.after(10)
    )
    assert answer.was_draining
    await until_draining(system, DRAINED, draining=False)
    served = set()
    async with asyncio.timeout(30):
        while served != {DRAINED, OTHER}:
            pieces = [each async for each in system.client.generate(request(), deadline=Deadline.after(30))]
            served.add(pieces[0].routing.rank.worker_id)
    await system.until_idle()


@pytest.mark.full
async def test_running_requests_continue_elsewhere_after_the_time_given(system: System) -> None:
    fields: dict[str, Any] = {
        "stop_conditions": StopConditions(max_tokens=400),
        "sampling_options": SamplingOptions(seed=3),
    }
    alone = request(constraints=RoutingConstraints(worker_id=OTHER), **fields)
    expected = tokens_of([each async for each in system.client.generate(alone, deadline=Deadline.after(60))])
    sent = request(constraints=RoutingConstraints(avoided_workers=[AvoidedWorker(worker_id=OTHER)]), **fields)
    pieces = []
    async with aclosing(system.client.generate(sent, deadline=Deadline.after(60))) as stream:
        pieces.append(await anext(stream))
        await system.scheduler.drain_worker(
            DrainWorkerRequest(component=component(system), worker_id=DRAINED, migrate_after_ms=0),
            deadline=Deadline.after(10),
        )
        pieces.extend([each async for each in stream])
    assert tokens_of(pieces) == expected
    ranks = [each.routing.rank.worker_id for each in pieces if each.HasField("routing")]
    assert ranks == [DRAINED, OTHER]
    await system.until_idle()


async def test_an_unknown_worker_cannot_be_drained(system: System) -> None:
    unknown = DrainWorkerRequest(component=component(system), worker_id=99)
    with pytest.raises(UnknownWorker):
        await system.scheduler.drain_worker(unknown, deadline=Deadline.after(10))
    with pytest.raises(NotFound):
        await system.scheduler.drain_worker(
            DrainWorkerRequest(component=Component(namespace="x", name="y")), deadline=Deadline.after(10)
        )


async def test_the_command_waits_until_no_request_runs_on_the_worker(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    name = component(system)
    pool = f"{name.namespace}/{name.name}"
    where = Where([], [], system.where["etcd"], system.where["namespace"])
    pinned = RoutingConstraints(worker_id=DRAINED)
    endless = request(constraints=pinned, stop_conditions=StopConditions(max_tokens=4000))
    async with aclosing(system.client.generate(endless, deadline=Deadline.after(60))) as stream:
        await anext(stream)
        with pytest.raises(CommandFailed, match="1 requests still run on worker 1"):
            await drain(where, pool, DRAINED, migrate_after_seconds=None, wait_seconds=0.1)
    await drain(where, pool, DRAINED, migrate_after_seconds=None, wait_seconds=30)
    assert "no request runs on it" in capsys.readouterr().out
    await undrain(where, pool, DRAINED)
    await undrain(where, pool, DRAINED)
    assert capsys.readouterr().out.splitlines() == ["worker 1 gets requests again", "worker 1 was not drained"]
    with pytest.raises(CommandFailed, match="99"):
        await drain(where, pool, 99, migrate_after_seconds=None, wait_seconds=0)
