"""Pools that restart as a whole."""

from __future__ import annotations

from kvrouter.frontend.workers.restarting_pools import RestartingPools
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration

POOL = ComponentName("ns", "pool")


def view(*workers: WorkerRegistration) -> dict[ComponentName, ComponentView]:
    return {POOL: ComponentView(POOL, ComponentDescriptor(), {each.worker_id: each for each in workers})}


def test_a_pool_restarts_for_a_while_after_it_lost_its_last_worker() -> None:
    now = [0.0]
    pools = RestartingPools(lambda: now[0])
    pools.update(view())
    assert not pools.is_restarting(POOL, 10), "it never had a worker"
    pools.update(view(WorkerRegistration(worker_id=1)))
    assert not pools.is_restarting(POOL, 10)
    pools.update(view(WorkerRegistration(worker_id=1, draining=True)))
    assert pools.is_restarting(POOL, 10)
    now[0] = 9
    pools.update(view())
    assert pools.is_restarting(POOL, 10)
    now[0] = 10
    assert not pools.is_restarting(POOL, 10), "it has been away for too long"
    pools.update(view(WorkerRegistration(worker_id=2)))
    assert pools.is_restarting(POOL, 10), "a Scheduler may not know the new worker yet"
    now[0] = 16
    assert not pools.is_restarting(POOL, 10)
    pools.update({})
    assert not pools.is_restarting(POOL, 10)


def test_a_pool_restarts_if_a_scheduler_knows_first_of_the_loss() -> None:
    pools = RestartingPools()
    assert not pools.is_restarting(POOL, 10, is_empty=True), "it never had a worker"
    pools.update(view())
    assert not pools.is_restarting(POOL, 10, is_empty=True)
    pools.update(view(WorkerRegistration(worker_id=1)))
    assert not pools.is_restarting(POOL, 10)
    assert pools.is_restarting(POOL, 10, is_empty=True)
