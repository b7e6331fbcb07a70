"""Workers of one process: each is registered with an address of its own, and all leave together."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.mocker import fleet
from kvrouter.mocker.fleet import running_fleet
from kvrouter.mocker.settings import MockerSettings
from kvrouter.net.etcd import connect
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import GetLoadRequest
from pydantic import ValidationError

from ...waiting import until

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


async def registrations(etcd: str, component: ComponentName) -> list[WorkerRegistration]:
    async with connect(etcd) as client:
        found = await client.get_prefix(component.workers_prefix.encode())
    return [WorkerRegistration.FromString(entry.value) for entry in found]


async def test_each_worker_is_registered_and_serves_its_ranks(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    settings = MockerSettings(
        namespace=component.namespace,
        component=component.name,
        etcd=etcd_endpoint,
        nats=nats_url,
        worker_id=10,
        workers_per_process=3,
    )
    async with running_fleet(settings):
        registered = await registrations(etcd_endpoint, component)
        assert sorted(worker.worker_id for worker in registered) == [10, 11, 12]
        assert len({worker.endpoint for worker in registered}) == 3
        for worker in registered:
            async with open_channel(worker.endpoint) as channel:
                answer = await remote(SERVICE, channel).get_load(GetLoadRequest(), deadline=Deadline.after(5))
            assert [report.rank.worker_id for report in answer.reports] == [worker.worker_id]
    async with asyncio.timeout(10):
        while await registrations(etcd_endpoint, component):
            await asyncio.sleep(0.01)


async def test_garbage_is_collected_again_though_etcd_is_away(
    monkeypatch: pytest.MonkeyPatch, nats_url: str, component: ComponentName
) -> None:
    collector = Mock()
    monkeypatch.setattr(fleet, "gc", collector)
    monkeypatch.setattr(fleet, "_START_SECONDS", 0.0)
    settings = MockerSettings(
        namespace=component.namespace,
        component=component.name,
        etcd=f"127.0.0.1:{free_port()}",
        nats=nats_url,
        workers_per_process=2,
    )
    starting = asyncio.create_task(running_fleet(settings).__aenter__())
    await until(lambda: collector.enable.called)
    assert not starting.done()
    collector.disable.assert_called_once()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


@pytest.mark.parametrize("other", [{"bind": "127.0.0.1:9000"}, {"registration": False}, {"openai": True}])
def test_several_workers_need_registration_and_free_ports(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="workers-per-process"):
        MockerSettings.model_validate({"workers_per_process": 2} | other)
