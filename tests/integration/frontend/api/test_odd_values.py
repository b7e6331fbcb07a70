"""Frontend, Scheduler and worker under requests whose values nobody means."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import frontend_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.common_pb2 import Component, RoutingRequest, TokenIds
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGetPotentialLoadsRequest, FrontendServiceSelectWorkerRequest
from kvrouter.v1.scheduler_pb2 import BookingUpdate, OpenSessionRequest, UpdateBookingsRequest

from ....odd_values import OddValues, nothing_fails
from ..gateway import MODEL, System, request

pytestmark = pytest.mark.timeout(240)

SERVICES = {
    "frontend": frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"],
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
}


def odd(system: System) -> OddValues:
    names = {"model": [MODEL], "namespace": [system.where["namespace"]], "name": ["workers"]}
    numbers = {"worker_id": [1], "dp_rank": [0], "block_size": [16]}
    return OddValues(names | numbers | {"excluded_worker_ids": [2], "allowed_worker_ids": [1]})


def address(system: System, service: str) -> str:
    if service == "worker":
        return system.workers[1].endpoint
    if service == "frontend":
        return system.target
    (registration,) = system.runtime.directory.services("scheduler").values()
    return registration.endpoint


@pytest.mark.parametrize("service", SERVICES)
async def test_no_value_makes_a_call_fail(system: System, service: str) -> None:
    await system.start_worker(1, clock_factor=1000.0)
    async with grpc.aio.insecure_channel(address(system, service)) as channel:
        await nothing_fails(channel, SERVICES[service], odd(system), times=20)
    async for _ in system.client.generate(request(), deadline=Deadline.after(30)):
        pass


async def test_no_value_makes_an_update_of_an_open_session_fail(system: System) -> None:
    await system.start_worker(1)
    values = odd(system)
    async with grpc.aio.insecure_channel(address(system, "scheduler")) as channel:
        stub: Any = remote(SERVICES["scheduler"], channel)
        await stub.open_session(OpenSessionRequest(session_id="odd"), deadline=Deadline.after(30))
        for number in range(1, 300):
            request = UpdateBookingsRequest(session_id="odd", first_number=number)
            request.updates.add().CopyFrom(values.message(BookingUpdate.DESCRIPTOR))
            response = await stub.update_bookings(request, deadline=Deadline.after(30))
            assert response.acknowledged == number
            assert all(each.code != grpc.StatusCode.INTERNAL.value[0] for each in response.refused), response


@pytest.mark.parametrize("name", ["", "a/b", "x" * 65])
async def test_an_invalid_component_name_is_a_bad_request(system: System, name: str) -> None:
    await system.start_worker(1)
    routing = RoutingRequest(component=Component(namespace="n", name=name), token_ids=TokenIds(ids=[1]))
    with pytest.raises(BadRequest) as caught:
        await system.client.select_worker(
            FrontendServiceSelectWorkerRequest(request=routing), deadline=Deadline.after(10)
        )
    assert caught.value.info.field == "component"
    with pytest.raises(BadRequest) as caught:
        await system.client.get_potential_loads(
            FrontendServiceGetPotentialLoadsRequest(request=routing), deadline=Deadline.after(10)
        )
    assert caught.value.info.field == "component"
