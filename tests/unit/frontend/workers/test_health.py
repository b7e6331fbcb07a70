"""Which workers are avoided, and when requests that wait for one are woken."""

from __future__ import annotations

from random import Random

import pytest
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.frontend_pb2 import WorkerHealthState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerDrain, WorkerRegistration

POOL, OTHER = ComponentName("ns", "pool"), ComponentName("ns", "other")
HEALTHY = WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY
LOST, SUSPECTED = WorkerHealthState.WORKER_HEALTH_STATE_LOST, WorkerHealthState.WORKER_HEALTH_STATE_SUSPECTED
FAILED = WorkerFailure(1, "INTERNAL", "worker 1 failed with INTERNAL: boom")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def components(
    pool: dict[int, str], other: dict[int, str] | None = None, drained: tuple[int, ...] = ()
) -> dict[ComponentName, ComponentView]:
    """``drained`` are workers of the pool that requests must leave."""

    def view(name: ComponentName, workers: dict[int, str]) -> ComponentView:
        registered = {key: WorkerRegistration(worker_id=key, endpoint=endpoint) for key, endpoint in workers.items()}
        drains = {key: WorkerDrain(migrate_unix_ns=1) for key in drained if name == POOL}
        return ComponentView(name, ComponentDescriptor(), registered, drains)

    return {POOL: view(POOL, pool), OTHER: view(OTHER, other or {})}


def health(clock: Clock | None = None, **workers: int) -> WorkerHealth:
    found = WorkerHealth(BackOff(failures=3), max_missed=5, clock=clock or Clock(), rng=Random(1))
    found.update(components({1: "a:1", 2: "b:1"}, {1: "c:1"}))
    return found


def miss(found: WorkerHealth, endpoint: str, times: int) -> None:
    for _ in range(times):
        found.missed(endpoint)


def fail(found: WorkerHealth, endpoint: str, times: int) -> None:
    for _ in range(times):
        call = found.begin(endpoint)
        call.failed(FAILED)
        call.end()


def states(found: WorkerHealth) -> list[WorkerHealthState]:
    return [each.state for each in found.status(POOL)]


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "seen at its end only"])
def test_a_worker_that_stops_and_refuses_connections_keeps_its_requests(is_announced: bool) -> None:
    found = health()
    call = found.begin("a:1")
    stopping = components({1: "a:1", 2: "b:1"})
    stopping[POOL].workers[1].draining = True
    announcement = [stopping] if is_announced else []
    for views in (*announcement, components({2: "b:1"})):  # It signs off at last.
        found.update(views)
        found.missed("a:1", is_unreachable=True)
        assert not call.worker.should_be_left
    miss(found, "a:1", 5)
    assert call.worker.suspected, "it does not even refuse connections"
    found.missed("b:1", is_unreachable=True)
    assert found.suspected == 2


def test_a_worker_that_misses_probes_in_a_row_is_suspected_until_it_answers() -> None:
    found = health()
    miss(found, "a:1", 4)
    assert not found.avoided(POOL)
    miss(found, "a:1", 1)
    assert [each.worker_id for each in found.avoided(POOL)] == [1]
    assert not found.avoided(OTHER), "its namesake in another component is another worker"
    assert [worker.worker_id for worker in found.healthy(POOL)] == [2]
    assert found.suspected == 1
    found.answered("a:1")
    assert not found.avoided(POOL)
    assert found.suspected == 0


def test_output_is_as_good_as_an_answer() -> None:
    found = health()
    call = found.begin("a:1")
    miss(found, "a:1", 4)
    call.answered()
    miss(found, "a:1", 4)
    assert not found.avoided(POOL)
    miss(found, "a:1", 1)
    assert [each.worker_id for each in found.avoided(POOL)] == [1]
    call.answered()
    call.worker.pieces += 1
    assert not found.avoided(POOL)
    assert not found.take_unheard(["a:1"])
    assert found.take_unheard(["a:1"]) == ["a:1"], "a probe is due again"


def test_a_worker_whose_requests_fail_is_avoided_and_tried_by_one_request_at_a_time() -> None:
    clock = Clock()
    found = health(clock)
    fail(found, "a:1", 3)
    assert [each.worker_id for each in found.avoided(POOL)] == [1]
    assert states(found) == [
        WorkerHealthState.WORKER_HEALTH_STATE_BACKED_OFF,
        WorkerHealthState.WORKER_HEALTH_STATE_HEALTHY,
    ]
    clock.now = 2.0
    assert not found.avoided(POOL)
    assert states(found)[0] == WorkerHealthState.WORKER_HEALTH_STATE_HALF_OPEN
    trial = found.begin("a:1")
    assert [each.worker_id for each in found.avoided(POOL)] == [1]
    trial.responded()
    assert not found.avoided(POOL)
    trial.completed()
    trial.end()
    assert found.backed_off == 0
    assert found.status(POOL)[0].last_failure == ""


def test_requests_that_end_without_a_verdict_never_count_against_a_worker() -> None:
    found = health()
    for _ in range(50):
        found.begin("a:1").end()
    assert not found.avoided(POOL)


def test_requests_that_wait_are_woken_when_their_worker_is_suspected_or_another_may_take_them() -> None:
    found = health()
    call = found.begin("a:1")
    woken = 0

    def reconsider() -> None:
        nonlocal woken
        woken += 1

    call.watch(reconsider)
    miss(found, "a:1", 4)
    assert woken == 0
    miss(found, "a:1", 1)
    assert (before := woken) > 0
    found.update(components({1: "a:1", 2: "b:1", 3: "d:1"}))
    assert woken > before, "a worker has come"
    miss(found, "b:1", 5)
    before = woken
    found.answered("b:1")
    assert woken > before, "a worker has recovered"
    before = woken
    call.end()
    found.update(components({1: "a:1", 2: "b:1"}))
    assert woken == before, "the call has ended"


def test_requests_that_leave_their_worker_when_it_is_suspected_end_their_calls_at_once() -> None:
    found = health()
    calls = [found.begin("a:1") for _ in range(3)]
    for call in calls:
        call.watch(call.end)
    found.update(components({2: "b:1"}))
    miss(found, "a:1", 5)
    assert set(found.endpoints()) == {"b:1"}, "the last call has ended"


def test_a_worker_that_left_is_known_until_its_last_call_has_ended() -> None:
    found = health()
    call = found.begin("a:1")
    found.update(components({2: "b:1"}))
    assert set(found.endpoints()) == {"a:1", "b:1"}
    miss(found, "a:1", 5)
    assert call.worker.suspected
    assert not found.avoided(POOL)
    call.end()
    assert set(found.endpoints()) == {"b:1"}
    assert found.suspected == 0
    found.answered("a:1")
    assert set(found.endpoints()) == {"b:1"}


def test_a_worker_that_restarts_at_another_address_starts_afresh() -> None:
    found = health()
    fail(found, "a:1", 3)
    found.update(components({1: "a:2", 2: "b:1"}))
    assert not found.avoided(POOL)


def test_a_worker_that_comes_back_at_its_address_under_another_id_is_one_worker() -> None:
    found = health()
    found.update(components({1: "a:1", 9: "a:1"}))
    miss(found, "a:1", 5)
    assert sorted(each.worker_id for each in found.avoided(POOL)) == [1, 9]
    assert all(each.reason for each in found.avoided(POOL))


def test_a_worker_whose_lease_ends_while_it_does_not_answer_is_lost_for_a_minute() -> None:
    clock = Clock()
    found = health(clock)
    miss(found, "a:1", 5)
    found.update(components({2: "b:1"}))
    assert [(each.worker_id, each.state) for each in found.status(POOL)] == [(1, LOST), (2, HEALTHY)]
    assert [worker.worker_id for worker in found.healthy(POOL)] == [2]
    assert "a:1" in found.endpoints(), "it is probed, since it may come back"
    clock.now = 61
    found.interval_ended(1)
    assert [each.worker_id for each in found.status(POOL)] == [2]
    assert (list(found.endpoints()), found.suspected) == (["b:1"], 0)


def test_a_lost_worker_is_listed_while_calls_run_on_it() -> None:
    clock = Clock()
    found = health(clock)
    call = found.begin("a:1")
    found.update(components({2: "b:1"}))
    assert [each.worker_id for each in found.status(POOL)] == [2], "it has not missed a probe"
    miss(found, "a:1", 5)
    clock.now = 61
    found.interval_ended(1)
    assert next((each.worker_id, each.state, each.calls) for each in found.status(POOL)) == (1, LOST, 1)
    call.end()
    assert [each.worker_id for each in found.status(POOL)] == [2]


def test_a_lost_worker_that_registers_again_is_not_lost() -> None:
    found = health()
    miss(found, "a:1", 5)
    found.update(components({2: "b:1"}))
    found.update(components({1: "a:1", 2: "b:1"}))
    assert states(found) == [SUSPECTED, HEALTHY]
    found.answered("a:1")
    found.update(components({2: "b:1"}))
    assert states(found) == [HEALTHY], "it has signed off"
    found.update(components({1: "a:1", 2: "b:1"}))
    miss(found, "a:1", 5)
    found.update(components({1: "z:1", 2: "b:1"}))
    assert states(found) == [HEALTHY, HEALTHY], "it was started again elsewhere"


def test_a_worker_has_died_if_it_is_lost_before_its_registration_is_known() -> None:
    found = health()
    fate = found.begin("new:1").fate(connection_lost=True)
    assert fate is not None
    assert fate.died
    call = found.begin("a:1")
    found.update(components({2: "b:1"}))
    assert call.fate(connection_lost=True) is None, "it has signed off"


def test_requests_leave_a_drained_worker_and_those_that_come_after_the_drain_stay() -> None:
    found = health()
    before = found.begin("a:1")
    assert not before.is_leaving
    found.update(components({1: "a:1", 2: "b:1"}, drained=(1,)))
    found.interval_ended(1)
    assert before.is_leaving
    meanwhile = found.begin("a:1")
    assert not meanwhile.is_leaving, "its Scheduler may know that the drain has ended"
    found.interval_ended(1)
    assert meanwhile.is_leaving
    found.interval_ended(1)
    early = found.begin("a:1")
    found.update(components({1: "a:1", 2: "b:1"}))
    late = found.begin("a:1")
    found.interval_ended(1)
    assert not early.is_leaving
    assert not late.is_leaving
