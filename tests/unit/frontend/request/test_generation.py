"""A request's attempts, over a Scheduler and workers that a test writes."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any, cast

from kvrouter.frontend.generate_request import GenerateRequest, StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.attempt_budget import AttemptBudget
from kvrouter.frontend.request.generation import BOOKED_ID_MARK, Generation
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.frontend.workers.attempt import RunningCall
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.connection import ResponseReceiver
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.poison_prompts import PoisonPrompts, RequestDeaths
from kvrouter.net.calls import OutcomeUnknown
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import BookingKey, Rank
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest, SelectWorkerResponse
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    WorkerServiceGenerateResponse,
)
from prometheus_client import CollectorRegistry

POOL = ComponentName("ns", "pool")
SILENT, SOUND = 1, 2
PROMPT = struct.pack("<20I", *range(20))
ENDPOINTS = {SILENT: "silent:1", SOUND: "sound:1"}


class Link:
    """A Scheduler that chooses as it is told to, and the source of the link to it."""

    def __init__(self, choices: Iterator[int]) -> None:
        self.requested: list[SelectWorkerRequest] = []
        self.live = 0
        self._choices = choices

    def link(self, *_: object) -> Link:
        return self

    async def book(
        self, key: BookingKey, request: SelectWorkerRequest, hashes: bytes, *, deadline: Deadline
    ) -> tuple[SelectWorkerResponse, LiveBooking]:
        request.booking.CopyFrom(key)
        routing = request.request
        self.requested.append(SelectWorkerRequest.FromString(request.SerializeToString()))
        worker_id = next(self._choices)
        self.live += 1
        selection = SelectWorkerResponse(rank=Rank(worker_id=worker_id), endpoint=ENDPOINTS[worker_id])
        return selection, LiveBooking.of(key, selection, hashes, routing.prompt_tokens, routing.block_size)

    def free(self, *_: object, prefill_complete: bool = False, **_fields: object) -> None:
        self.live -= 1

    def prefill_complete(self, _: object, *, handover_us: int | None) -> None: ...

    def report_output(self, *_: object) -> None: ...


class Pool:
    """Workers, of which one never answers, or loses its connection if ``breaks`` is set."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.events: list[str] = []
        self._breaks = breaks

    def connection(self, endpoint: str) -> Any:
        return SimpleNamespace(generate=partial(self.start, endpoint), abort=partial(self.abort, endpoint))

    async def abort(self, endpoint: str, request_id: str) -> bool:
        await asyncio.sleep(0)
        self.events.append(f"abort {request_id.partition(BOOKED_ID_MARK)[0]} at {endpoint}")
        return True

    def start(self, endpoint: str, _request: bytes, receiver: ResponseReceiver, *, deadline: Deadline) -> RunningCall:
        self.events.append(f"start at {endpoint}")
        if endpoint == ENDPOINTS[SILENT] and self._breaks:
            receiver.on_error(OutcomeUnknown("the stream broke"))
        if endpoint == ENDPOINTS[SOUND]:
            output = GenerateOutput(token_ids=[1], finish_reason=FinishReason.FINISH_REASON_LENGTH)
            receiver.on_response(WorkerServiceGenerateResponse(output=output).SerializeToString())
            receiver.on_end()
        return NotCancelled()


class NotCancelled:
    def cancel(self) -> None: ...


class Outputs:
    """Collects the workers that the output comes from."""

    def __init__(self) -> None:
        self.latest = 0
        self.served_by: list[int] = []

    def routed(self, routing: Routed) -> None:
        self.latest = routing.rank.worker_id

    def output(self, _: Output) -> None:
        self.served_by.append(self.latest)


async def test_a_scheduler_that_does_not_know_the_other_worker_yet_costs_no_attempts() -> None:
    """It chooses the silent worker again and again, for lack of any other."""
    workers = {key: WorkerRegistration(worker_id=key, endpoint=endpoint) for key, endpoint in ENDPOINTS.items()}
    view = ComponentView(POOL, ComponentDescriptor(block_size=16), workers)
    metrics = FrontendMetrics(CollectorRegistry())
    health = WorkerHealth(BackOff(), max_missed=2)
    health.update({POOL: view})
    health.missed(ENDPOINTS[SILENT])
    health.missed(ENDPOINTS[SILENT])
    link = Link(chain(repeat(SILENT, 6), repeat(SOUND)))
    request = GenerateRequest(model="m", request_id="r", stop=StopRules(1))
    client = WorkerClient(cast(WorkerPool, Pool()), health, metrics)
    generation = Generation(request, PROMPT, view, cast(SchedulerLinks, link), client, metrics, budget(), deaths())
    collecting = asyncio.create_task(collected(generation))
    async with asyncio.timeout(30):
        for requested in range(2, 7):
            while len(link.requested) < requested:
                await asyncio.sleep(0)
            for _ in range(20):  # It stays there until a further probe is missed.
                await asyncio.sleep(0)
            assert len(link.requested) == requested
            health.missed(ENDPOINTS[SILENT])
        assert await collecting == [SOUND]
    assert [each.booking.attempt for each in link.requested] == list(range(7))
    avoided = [[worker.worker_id for worker in each.request.constraints.avoided_workers] for each in link.requested]
    assert avoided == [[SILENT]] * 7
    assert not any(each.request.constraints.excluded_worker_ids for each in link.requested)
    assert link.live == 0


async def test_a_request_whose_outcome_is_unknown_is_aborted_before_it_is_retried() -> None:
    workers = {key: WorkerRegistration(worker_id=key, endpoint=endpoint) for key, endpoint in ENDPOINTS.items()}
    view = ComponentView(POOL, ComponentDescriptor(block_size=16), workers)
    metrics = FrontendMetrics(CollectorRegistry())
    health = WorkerHealth(BackOff(), max_missed=2)
    health.update({POOL: view})
    link, pool = Link(iter([SILENT, SOUND])), Pool(breaks=True)
    request = GenerateRequest(model="m", request_id="r", stop=StopRules(1))
    client = WorkerClient(cast(WorkerPool, pool), health, metrics)
    generation = Generation(request, PROMPT, view, cast(SchedulerLinks, link), client, metrics, budget(), deaths())
    assert await collected(generation) == [SOUND]
    assert pool.events == ["start at silent:1", "abort r at silent:1", "start at sound:1"]
    assert link.live == 0


def budget() -> AttemptBudget:
    return AttemptBudget(max_attempts=3, migration_limit=3, pinned=False)


def deaths() -> RequestDeaths:
    return RequestDeaths(PoisonPrompts(60), "", "m", PROMPT)


async def collected(generation: Generation) -> list[int]:
    receiver = Outputs()
    await generation.run(receiver, Deadline.after(30))
    return receiver.served_by
