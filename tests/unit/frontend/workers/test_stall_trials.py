"""Trials of stalled workers: what ends a stall, and what leaves it to the requests of clients."""

from __future__ import annotations

import asyncio
from random import Random
from typing import cast

import pytest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.connection import ResponseReceiver
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.probes import StallTrials
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.errors import BadRequest, DependencyAway
from kvrouter.v1.frontend_pb2 import WorkerHealthState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from prometheus_client import CollectorRegistry

POOL = ComponentName("ns", "pool")
STALLED, HEALTHY = WorkerHealthState.WORKER_HEALTH_STATE_STALLED, WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY
TOKEN = WorkerServiceGenerateResponse(output=GenerateOutput(token_ids=[7])).SerializeToString()


class Call:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Rig:
    """One worker that has stalled, a clock, and the calls that were made to it."""

    def __init__(self, endpoint: str = "a:1", role: Role = Role.ROLE_BOTH) -> None:
        self.seconds = 0.0
        self.sent: list[WorkerServiceGenerateRequest] = []
        self.receivers: list[ResponseReceiver] = []
        self.calls: list[Call] = []
        self.health = WorkerHealth(
            BackOff(), max_missed=3, stall_seconds=1.0, clock=lambda: self.seconds, rng=Random(1)
        )
        worker = WorkerRegistration(worker_id=1, endpoint=endpoint, role=role)
        self.health.update({POOL: ComponentView(POOL, ComponentDescriptor(), {1: worker})})
        metrics = FrontendMetrics(CollectorRegistry())
        self.trials = StallTrials(WorkerClient(cast(WorkerPool, self), self.health, metrics))
        call = self.health.begin(endpoint, 1)
        call.responded()
        self.until_stalled()
        call.end()
        assert self.state == STALLED

    @property
    def state(self) -> WorkerHealthState:
        return self.health.status()[0].state

    def until_stalled(self) -> None:
        """Passes intervals until the worker stalls once more."""
        (worker,) = self.health._workers.values()
        before = worker.stalls
        for _ in range(1000):
            self.health.interval_ended(1.0)
            if worker.stalls > before:
                return
        raise AssertionError("the worker did not stall")

    async def after_back_off(self) -> None:
        await asyncio.sleep(0)  # The end of a trial is noticed in the next pass of the loop.
        self.seconds += self.health.status()[0].retry_in_ms / 1000 + 0.1
        self.trials.start_due()

    def connection(self, _endpoint: str) -> Rig:
        return self

    def generate(self, request: bytes, receiver: ResponseReceiver, *, deadline: Deadline) -> Call:
        self.sent.append(WorkerServiceGenerateRequest.FromString(request))
        self.receivers.append(receiver)
        self.calls.append(Call())
        return self.calls[-1]


async def test_the_first_output_of_a_trial_ends_a_stall_but_not_the_count_of_failures() -> None:
    rig = Rig()
    rig.trials.start_due()
    assert not rig.sent, "the back-off has not ended"
    await rig.after_back_off()
    rig.trials.start_due()
    assert [len(each.token_ids) for each in rig.sent] == [1], "one trial at a time"
    failures = rig.health.status()[0].consecutive_failures
    rig.receivers[0].on_response(TOKEN)
    assert (rig.state, rig.calls[0].cancelled) == (HEALTHY, True)
    assert rig.health.status()[0].consecutive_failures == failures, "it may stall after every first token"
    assert rig.health.status()[0].calls == 0
    rig.trials.start_due()
    assert len(rig.sent) == 1


async def test_a_trial_without_output_is_a_stall_with_a_longer_back_off() -> None:
    rig = Rig()
    first = rig.health.status()[0].retry_in_ms
    await rig.after_back_off()
    rig.until_stalled()
    assert (rig.state, rig.calls[0].cancelled, rig.health.status()[0].calls) == (STALLED, True, 0)
    assert rig.health.status()[0].retry_in_ms > first
    await rig.after_back_off()
    assert len(rig.sent) == 2


async def test_a_trial_that_fails_by_the_fault_of_its_worker_is_repeated() -> None:
    rig = Rig()
    await rig.after_back_off()
    rig.receivers[0].on_error(DependencyAway("the engine restarts"))
    assert rig.state == STALLED
    await rig.after_back_off()
    assert len(rig.sent) == 2


async def test_a_worker_that_refuses_the_trial_is_left_to_the_requests_of_clients() -> None:
    rig = Rig()
    await rig.after_back_off()
    rig.receivers[0].on_error(BadRequest("token 0 is unknown"))
    await rig.after_back_off()
    assert len(rig.sent) == 1
    request = rig.health.begin("a:1", 10)
    request.responded()
    assert rig.state == HEALTHY


@pytest.mark.parametrize(("endpoint", "role"), [("http://a:1", Role.ROLE_BOTH), ("a:1", Role.ROLE_PREFILL)])
async def test_workers_without_a_generate_for_whole_requests_are_not_tried(endpoint: str, role: Role) -> None:
    rig = Rig(endpoint, role)
    await rig.after_back_off()
    assert not rig.sent


async def test_trials_that_run_when_the_frontend_stops_are_cancelled() -> None:
    rig = Rig()
    await rig.after_back_off()
    rig.trials.close()
    assert (rig.calls[0].cancelled, rig.health.status()[0].calls) == (True, 0)
