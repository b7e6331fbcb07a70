"""Keys that go from etcd, and an etcd that is frozen, while requests run: nobody is refused, and everything is back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress

import pytest
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import AWAY, connect
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.indexer_pb2 import TakeSnapshotRequest, VerifyRequest
from kvrouter.v1.names import ComponentName, namespace_prefix, services_prefix

from ..waiting import until
from .processes import PATIENCE_SECONDS, SCHEDULERS, Processes, start_system, system
from .rig import FULL
from .steady_load import Outcomes, steady_load

LEASE_SECONDS = 2
LEASE = ("--lease-seconds", str(LEASE_SECONDS))


@pytest.fixture
async def own_processes(nats_url: str, own_etcd: EtcdServer, namespace: str) -> AsyncIterator[Processes]:
    """Services as processes, with an etcd that may be frozen."""
    async with system(nats_url, own_etcd.endpoint, namespace) as found:
        yield found


async def start(processes: Processes) -> None:
    processes.where += LEASE
    await processes.start("indexer", "indexer-0", "--snapshot-check-seconds", "0.2")
    await start_system(processes, schedulers=2, frontends=1, clock_factor=20, mode="kv")
    await processes.ready("indexer", "indexer-0")


async def keys_of(etcd: str, prefix: str) -> set[bytes]:
    """Returns the keys that are to last: not the lock of a snapshot that is being taken."""
    async with connect(etcd) as client:
        keys = {pair.key for pair in await client.get_prefix(prefix.encode())}
    return {key for key in keys if not key.endswith(b"/snapshot-lock")}


async def until_any_keys_of(etcd: str, prefix: str) -> set[bytes]:
    """Returns the keys, once there are some: a lease of two seconds ends while a process is held up."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (keys := await keys_of(etcd, prefix)):
            await asyncio.sleep(0.05)
    return keys


async def until_back(etcd: str, prefix: str, keys: set[bytes]) -> None:
    """Returns when all keys are in etcd. An etcd that does not answer yet, as just after a freeze, is asked again."""

    missing = keys

    async def back() -> bool:
        nonlocal missing
        with suppress(*AWAY):
            missing = keys - await keys_of(etcd, prefix)
        return not missing

    try:
        await until(back, PATIENCE_SECONDS)
    except TimeoutError:
        raise AssertionError(f"not back in etcd: {missing}") from None


async def more_requests(outcomes: Outcomes, count: int = 100 if FULL else 30) -> None:
    """Returns when so many more requests have ended."""
    target = outcomes.ended + count

    async def ended() -> bool:
        return outcomes.ended >= target

    await until(ended, PATIENCE_SECONDS)


async def assert_settled(processes: Processes, pool: ComponentName) -> None:
    """No Scheduler has a booking, and the index has what the workers have."""
    for name in SCHEDULERS:
        await processes.until_booked(name, 0)
    component = Component(namespace=pool.namespace, name=pool.name)

    async def agrees() -> bool:
        answers = processes.indexer("indexer-0").verify(VerifyRequest(component=component), deadline=Deadline.after(20))
        async with aclosing(answers) as ranks:
            found = [(each.compared, each.missing_blocks, each.surplus_blocks) async for each in ranks]
        return found == [(True, 0, 0)] * 2

    await until(agrees, PATIENCE_SECONDS)


async def test_every_key_that_is_deleted_comes_back_and_no_request_notices(
    processes: Processes, etcd_endpoint: str, namespace: str, record_property: Callable[[str, object], None]
) -> None:
    pool = ComponentName(namespace, "workers")
    await start(processes)
    kinds = {
        "descriptor": pool.descriptor_key,
        "workers": pool.workers_prefix,
        "incarnations": pool.incarnation_key(1)[:-16],
        "schedulers": services_prefix(namespace, "scheduler"),
        "indexers": services_prefix(namespace, "indexer"),
        "frontends": services_prefix(namespace, "frontend"),
        "applied": pool.applied_key("x")[:-1],
        "snapshot": pool.snapshot_key,
        "everything": namespace_prefix(namespace),
    }
    async with steady_load(processes.frontend("frontend-0")) as outcomes:
        await more_requests(outcomes)
        component = Component(namespace=namespace, name=pool.name)
        await processes.indexer("indexer-0").take_snapshot(
            TakeSnapshotRequest(component=component), deadline=Deadline.after(20)
        )
        for kind, prefix in kinds.items():
            before = await until_any_keys_of(etcd_endpoint, prefix)
            async with connect(etcd_endpoint) as client:
                await client.delete_prefix(prefix.encode())
            await until_back(etcd_endpoint, prefix, before)
            await more_requests(outcomes)
            assert outcomes.failed == {}, kind
    record_property("outcomes", dict(outcomes.seen))
    assert outcomes.failed == {}
    await assert_settled(processes, pool)


@pytest.mark.full
@pytest.mark.parametrize(
    "leases",
    [pytest.param(0.5, id="short of the lease", marks=pytest.mark.full), pytest.param(3.0, id="beyond the lease")],
)
async def test_no_request_fails_while_etcd_is_frozen_or_when_it_goes_on(
    own_processes: Processes,
    own_etcd: EtcdServer,
    namespace: str,
    leases: float,
    record_property: Callable[[str, object], None],
) -> None:
    pool = ComponentName(namespace, "workers")
    await start(own_processes)
    keys = await keys_of(own_etcd.endpoint, namespace_prefix(namespace))
    async with steady_load(own_processes.frontend("frontend-0")) as outcomes:
        for _ in range(5 if FULL else 1):
            await more_requests(outcomes)
            own_etcd.pause()
            # The fault itself: the time for which etcd is frozen, as a multiple of the lease.
            await asyncio.sleep(leases * LEASE_SECONDS)
            own_etcd.resume()
            await more_requests(outcomes)
            await until_back(own_etcd.endpoint, namespace_prefix(namespace), keys)
            await more_requests(outcomes)
    record_property("outcomes", dict(outcomes.seen))
    assert outcomes.failed == {}
    await assert_settled(own_processes, pool)
