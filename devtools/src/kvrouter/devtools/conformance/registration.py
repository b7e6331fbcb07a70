"""Checks whether the worker can be reached, and whether routers find it in etcd."""

from __future__ import annotations

import aetcd
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import WorkerUnderTest
from kvrouter.net.decoding import Undecodable
from kvrouter.net.etcd import AWAY, connect
from kvrouter.net.etcd.registry_entries import read_descriptor, read_worker
from kvrouter.publisher.config import HASH_SCHEME
from kvrouter.v1.names import ComponentName, worker_id_of_key
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration
from kvrouter.v1.worker_pb2 import GetLoadResponse


async def check_reachable(worker: WorkerUnderTest) -> str:
    """Waits until the worker serves, and checks its registration."""

    async def reached() -> GetLoadResponse | None:
        try:
            return await worker.loads()
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return None
            raise

    response = await worker.until(reached) or await worker.loads()
    worker.model, worker.block_size = response.model, response.block_size
    worker.serves_call_stream = response.serves_call_stream
    worker.worker_id = next((report.rank.worker_id for report in response.reports), 0)
    if not response.model or not response.block_size:
        raise CheckFailed(
            expected="model and block_size in the response of GetLoad",
            received=f"model {response.model!r} and block_size {response.block_size}",
            advice="fill them in: routers that list their workers learn both there.",
        )
    stub = HealthStub(worker.channel)
    status = (await stub.Check(HealthCheckRequest(), timeout=worker.options.seconds)).status
    if status != HealthCheckResponse.SERVING:
        raise CheckFailed(
            expected="SERVING from grpc.health.v1.Health/Check",
            received=HealthCheckResponse.ServingStatus.Name(status),
            advice="set the status of the empty service name: Frontends probe workers with it.",
        )
    return f"model {worker.model!r}, {worker.block_size} tokens per block"


async def check_registration(worker: WorkerUnderTest) -> str:
    """Checks the worker's keys in etcd."""
    options = worker.options
    if not options.etcd or options.component is None:
        raise CheckSkipped("needs --etcd and --component")
    component = options.component
    try:
        async with connect(options.etcd) as client:
            descriptor = await _descriptor(client, component)
            registration, lease = await _registration(client, component, worker)
    except AWAY as error:
        raise CheckFailed(
            expected=f"an answer of etcd at {options.etcd}", received=str(error), advice="correct --etcd."
        ) from None
    worker.registration, worker.worker_id = registration, registration.worker_id
    worker.max_model_len = worker.max_model_len or registration.max_model_len
    worker.serves_call_stream |= registration.serves_call_stream
    if not lease:
        raise CheckFailed(
            expected="a registration under a lease",
            received="a registration without one",
            advice="write the key with a lease and keep it alive, so that a worker that dies disappears.",
        )
    known = {rank.dp_rank for rank in registration.ranks}
    _compare("dp_rank among its ranks", options.dp_rank, options.dp_rank if options.dp_rank in known else sorted(known))
    for name, expected in (
        ("model", descriptor.model),
        ("block_size", descriptor.block_size),
        ("hash_scheme", HASH_SCHEME),
        ("max_model_len", descriptor.max_model_len),
        ("publishes_events", True),
        ("draining", False),
    ):
        _compare(name, expected, getattr(registration, name))
    for name, served in (("model", worker.model), ("block_size", worker.block_size)):
        _compare(f"{name} as GetLoad says", served, getattr(registration, name))
    state = await worker.snapshot()
    incarnation = next(rank.incarnation for rank in registration.ranks if rank.dp_rank == options.dp_rank)
    _compare("incarnation as GetRankState says", state.cursor.incarnation, incarnation)
    return f"worker {registration.worker_id} of {component}, ranks {sorted(known)}, incarnation {incarnation}"


async def _descriptor(client: aetcd.Client, component: ComponentName) -> ComponentDescriptor:
    found = await client.get(component.descriptor_key.encode())
    if found is None:
        raise CheckFailed(
            expected=f"a descriptor at {component.descriptor_key}",
            received="none",
            advice="the first worker of a component writes it. Correct --component, or let the worker write it.",
        )
    try:
        return read_descriptor(component, found.value)
    except Undecodable as error:
        raise CheckFailed(
            expected="a valid ComponentDescriptor", received=str(error), advice="see protos/kvrouter/v1/registry.proto."
        ) from None


async def _registration(
    client: aetcd.Client, component: ComponentName, worker: WorkerUnderTest
) -> tuple[WorkerRegistration, int]:
    """Returns the registration with the worker's address, and its lease."""
    endpoints = []
    for entry in await client.get_prefix(component.workers_prefix.encode()):
        worker_id = worker_id_of_key(entry.key.decode(errors="replace"))
        if worker_id is None:
            continue
        try:
            registration = read_worker(component, worker_id, entry.value)
        except Undecodable as error:
            if worker_id == worker.worker_id:
                raise CheckFailed(
                    expected="a valid WorkerRegistration",
                    received=str(error),
                    advice="see protos/kvrouter/v1/registry.proto.",
                ) from None
            continue
        endpoints.append(registration.endpoint)
        if registration.endpoint == worker.endpoint or worker_id == worker.worker_id:
            _compare("endpoint", worker.endpoint, registration.endpoint)
            return registration, int(entry.lease)
    raise CheckFailed(
        expected=f"a registration with endpoint {worker.endpoint} below {component.workers_prefix}",
        received=f"{', '.join(endpoints) or 'none'}",
        advice="register the address by which others reach the worker, and name that in --worker.",
    )


def _compare(name: str, expected: object, received: object) -> None:
    if expected != received:
        raise CheckFailed(
            expected=f"{name}: {expected!r}",
            received=f"{received!r} in the registration",
            advice="routers ignore a worker whose registration does not fit; correct the registration.",
        )
