"""Which roles may call which methods: the table names what exists, and the rest is for administrators."""

from __future__ import annotations

import pytest
from kvrouter.net.auth import SERVICE_ROLES, may_call
from kvrouter.v1 import frontend_pb2, indexer_pb2, scheduler_pb2, sync_pb2, worker_pb2

CHECKED = [
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"],
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    sync_pb2.DESCRIPTOR.services_by_name["ReplicaService"],
]


def test_the_table_names_services_and_methods_of_the_contract() -> None:
    assert set(SERVICE_ROLES) == {service.full_name for service in CHECKED}
    for service in CHECKED:
        assert set(SERVICE_ROLES[service.full_name]) <= {method.name for method in service.methods}


@pytest.mark.parametrize(
    "method",
    [
        "SchedulerService/DrainWorker",
        "SchedulerService/UndrainWorker",
        "IndexerService/ResetStates",
        "IndexerService/Resync",
        "IndexerService/Load",
        "IndexerService/TakeSnapshot",
        "IndexerService/Verify",
        "IndexerService/AddedLater",
    ],
)
def test_what_the_table_does_not_list_is_for_administrators(method: str) -> None:
    assert may_call({"admin"}, f"kvrouter.v1.{method}")
    assert not may_call({"frontend", "scheduler", "indexer", "worker"}, f"kvrouter.v1.{method}")


def test_a_worker_may_call_nothing() -> None:
    for service in CHECKED:
        for method in service.methods:
            assert not may_call({"worker"}, f"{service.full_name}/{method.name}")
            assert not may_call((), f"{service.full_name}/{method.name}")


def test_a_process_with_several_roles_may_do_what_each_of_them_may() -> None:
    assert may_call({"scheduler", "indexer"}, "kvrouter.v1.WorkerService/GetRankState")
    assert not may_call({"scheduler"}, "kvrouter.v1.WorkerService/GetRankState")


def test_services_of_clients_are_not_in_the_table() -> None:
    frontend = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]
    assert may_call((), f"{frontend.full_name}/Generate")
    assert may_call((), "grpc.health.v1.Health/Check")
