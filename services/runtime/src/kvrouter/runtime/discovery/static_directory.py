"""Discovery from a static list: probes every listed worker and yields the same entries that etcd would contain.

A worker is left out until it answers. Properties beyond the list come from the worker: ``GetLoad`` returns its id,
ranks, blocks and incarnation, and grpc.health says whether it is stopping. A server with only an OpenAI API is
asked for its models. A worker that serves another model than the list says, or has blocks of another size, is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

import aiohttp
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.engines.openai_server import Unanswered, served_models
from kvrouter.net.etcd import Snapshot
from kvrouter.net.tls import Tls
from kvrouter.runtime.config.fields import ROLES, is_url
from kvrouter.runtime.config.static_workers import StaticComponent, StaticEndpoints, StaticWorker
from kvrouter.runtime.contracts import SERVICES, Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc.client import open_channel, remote
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName, services_prefix
from kvrouter.v1.registry_pb2 import (
    ComponentDescriptor,
    RankRegistration,
    ServiceKind,
    ServiceRegistration,
    WorkerRegistration,
)
from kvrouter.v1.worker_pb2 import GetLoadRequest, GetLoadResponse
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(component="discovery")

_PROBE_SECONDS = 2.0
"""Deadline of a probe."""
_FAILURES = 2
"""Consecutive failed probes after which a worker is left out; a single one may be late on a busy machine."""


@dataclass(slots=True)
class _Known:
    """State of a listed worker."""

    registration: WorkerRegistration | None = None
    """None while the worker is left out."""
    failures: int = 0
    """Consecutive failed probes."""
    reports: Sequence[LoadReport] = ()
    """Its load reports of the last probe."""
    mismatch: str = ""
    """How it differs from the list; empty if it does not."""


class StaticDiscovery:
    """Probes all listed workers and Schedulers. ``changes`` replaces ``watch_prefix`` of etcd."""

    def __init__(
        self, listed: StaticEndpoints, namespace: str, registry: CollectorRegistry, tls: Tls | None = None
    ) -> None:
        self._tls = tls
        self._listed = listed
        self._twins: set[str] = set()
        """Workers left out because another has their id."""
        workers = Gauge("kvrouter_directory_listed_workers", "Listed workers, live or not.", registry=registry)
        workers.set(sum(len(component.workers) for component in listed.components))
        self._namespace = namespace
        self._known: dict[str, _Known] = {}
        self.on_load: Callable[[ComponentName, LoadReport], None] | None = None
        """Called with the load report of each rank after every probe."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._session: aiohttp.ClientSession | None = None

    async def changes(self) -> AsyncGenerator[Snapshot]:
        """Yields all entries whenever one has changed, first after every listed process was probed once. Never ends."""
        last: Mapping[str, bytes] | None = None
        try:
            while True:
                entries = await self._look()
                if entries != last:
                    last = entries
                    yield Snapshot(entries)
                self._report_load()
                await asyncio.sleep(self._listed.probe_seconds)
        finally:
            for channel in self._channels.values():
                await channel.close()
            self._channels.clear()
            if self._session is not None:
                await self._session.close()

    async def _look(self) -> dict[str, bytes]:
        async with asyncio.TaskGroup() as group:
            for component in self._listed.components:
                for place, worker in enumerate(component.workers, start=1):
                    group.create_task(self._probe(component, worker, place))
            schedulers = [
                (address, group.create_task(self._serving("scheduler", address))) for address in self._listed.schedulers
            ]
        entries: dict[str, bytes] = {}
        for component in self._listed.components:
            entries |= self._component_entries(component)
        for address, serving in schedulers:
            registration = ServiceRegistration(
                kind=ServiceKind.SERVICE_KIND_SCHEDULER,
                instance_id=address,
                endpoint=address,
                ready=serving.result() is True,
            )
            entries[services_prefix(self._namespace, "scheduler") + address] = registration.SerializeToString()
        return entries

    def _component_entries(self, component: StaticComponent) -> dict[str, bytes]:
        name = ComponentName(self._namespace, component.name)
        entries = {name.descriptor_key: _descriptor(name, component).SerializeToString(deterministic=True)}
        for worker in component.workers:
            registration = self._known[worker.endpoint].registration
            if registration is None:
                continue
            key = name.worker_key(registration.worker_id)
            if key in entries:
                if worker.endpoint not in self._twins:
                    log.warning("static_worker.duplicate_id", endpoint=worker.endpoint, key=key)
                self._twins.add(worker.endpoint)
                continue
            self._twins.discard(worker.endpoint)
            entries[key] = registration.SerializeToString(deterministic=True)
        return entries

    def _report_load(self) -> None:
        if self.on_load is None:
            return
        for component in self._listed.components:
            for worker in component.workers:
                for report in self._known[worker.endpoint].reports:
                    self.on_load(ComponentName(self._namespace, component.name), report)

    async def _probe(self, component: StaticComponent, worker: StaticWorker, place: int) -> None:
        known = self._known.setdefault(worker.endpoint, _Known())
        if is_url(worker.endpoint):
            await self._probe_openai_server(component, worker, known, place)
            return
        service = cast(Worker, remote(SERVICES["worker"], self._channel(worker.endpoint, "worker")))
        answer, failure, mismatch = GetLoadResponse(), "", ""
        serving = await self._serving("worker", worker.endpoint)
        try:
            answer = await service.get_load(GetLoadRequest(), deadline=Deadline.after(_PROBE_SECONDS))
            mismatch = _mismatch(component, answer)
        except KvRouterError as error:
            # An engine without load reports is usable.
            if error.code is not grpc.StatusCode.UNIMPLEMENTED:
                failure = f"{error.message}; it is asked over gRPC: add http:// if it is a server with an OpenAI API"
        known.reports = [] if mismatch else [_as_listed(report, worker) for report in answer.reports]
        if self._is_left_out(worker, known, failure=failure, mismatch=mismatch):
            return
        registration = self._register(component, worker, known, place)
        registration.draining = serving is False
        registration.serves_call_stream = answer.serves_call_stream
        registration.serves_structured_output = answer.serves_structured_output

    async def _probe_openai_server(
        self, component: StaticComponent, worker: StaticWorker, known: _Known, place: int
    ) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        failure, mismatch, status = "", "", 0
        try:
            status, models = await served_models(self._session, worker.endpoint, timeout_seconds=_PROBE_SECONDS)
            if models is not None and component.model not in models:
                mismatch = f"expected model {component.model!r}, the server has {', '.join(map(repr, models[:8]))}"
        except Unanswered as error:
            failure = str(error)
        if not self._is_left_out(worker, known, failure=failure, mismatch=mismatch):
            if known.registration is None and status == HTTPStatus.NOT_FOUND:
                log.warning(
                    "static_worker.doubtful",
                    endpoint=worker.endpoint,
                    cause=f"it answers {status} to GET /v1/models",
                    advice="Check its URL and port.",
                )
            self._register(component, worker, known, place).openai_endpoint = worker.endpoint

    def _is_left_out(self, worker: StaticWorker, known: _Known, *, failure: str, mismatch: str) -> bool:
        """Records a probe that failed or found another worker than is listed. Returns whether it did."""
        if mismatch:
            if mismatch != known.mismatch:
                log.error("static_worker.mismatched", endpoint=worker.endpoint, cause=mismatch)
            known.registration, known.mismatch = None, mismatch
        elif failure:
            known.failures += 1
            if known.failures == 1 and known.registration is None:
                log.warning("static_worker.silent", endpoint=worker.endpoint, cause=failure)
            if known.failures == _FAILURES and known.registration is not None:
                log.warning("static_worker.ignored", endpoint=worker.endpoint, cause=failure)
                known.registration = None
        return bool(mismatch or failure)

    def _register(
        self, component: StaticComponent, worker: StaticWorker, known: _Known, place: int
    ) -> WorkerRegistration:
        """Records a successful probe. Returns the worker's registration."""
        if known.registration is None:
            log.info("static_worker.answered", endpoint=worker.endpoint)
        known.failures, known.mismatch = 0, ""
        known.registration = _registration(
            ComponentName(self._namespace, component.name), component, worker, place, known.reports
        )
        return known.registration

    async def _serving(self, role: str, address: str) -> bool | None:
        """Returns whether a service is ready by grpc.health; None if it does not report it."""
        health: Any = health_pb2_grpc.HealthStub(self._channel(address, role))
        try:
            request = health_pb2.HealthCheckRequest(service=SERVICES[role].full_name)
            answer = await health.Check(request, timeout=_PROBE_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _channel(self, address: str, role: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address, tls=self._tls, role=role)
        return channel


def _mismatch(component: StaticComponent, answer: GetLoadResponse) -> str:
    """Returns how a worker differs from its component in the list; empty if it fits or does not say."""
    if any("total_blocks" in report and not report.total_blocks for report in answer.reports):
        return "expected total_blocks of 1 or more, or unset while unknown, the worker reports 0"
    differences = [
        f"expected {name} {expected!r}, the worker has {received!r}"
        for name, expected, received in (
            ("model", component.model, answer.model),
            ("block_size", component.block_size, answer.block_size),
        )
        if received and received != expected
    ]
    return "; ".join(differences)


def _as_listed(report: LoadReport, worker: StaticWorker) -> LoadReport:
    """Returns the report with the worker id from the list."""
    listed = LoadReport()
    listed.CopyFrom(report)
    if worker.worker_id is not None:
        listed.rank.worker_id = worker.worker_id
    return listed


def _descriptor(name: ComponentName, component: StaticComponent) -> ComponentDescriptor:
    return ComponentDescriptor(
        component=Component(namespace=name.namespace, name=name.name),
        model=component.model,
        block_size=component.block_size,
        role=ROLES[component.role],
        max_model_len=component.max_model_len or None,
    )


def _registration(
    name: ComponentName, component: StaticComponent, worker: StaticWorker, place: int, reports: Sequence[LoadReport]
) -> WorkerRegistration:
    said = reports[0].rank.worker_id if reports else place
    incarnations = {report.rank.dp_rank: report.incarnation for report in reports}
    if worker.ranks is None and reports:
        ranks = [
            RankRegistration(
                dp_rank=report.rank.dp_rank,
                incarnation=report.incarnation,
                total_blocks=report.total_blocks if "total_blocks" in report else None,
            )
            for report in reports
        ]
    else:
        ranks = [
            RankRegistration(dp_rank=number, incarnation=incarnations.get(number, 0), total_blocks=worker.total_blocks)
            for number in range(worker.ranks or 1)
        ]
    return WorkerRegistration(
        worker_id=said if worker.worker_id is None else worker.worker_id,
        component=Component(namespace=name.namespace, name=name.name),
        model=component.model,
        endpoint=worker.endpoint,
        block_size=component.block_size,
        role=ROLES[component.role],
        ranks=ranks,
        labels=worker.labels,
        lora_names=worker.lora_names,
        engine=worker.engine or "",
        max_batched_tokens=worker.max_batched_tokens,
        max_model_len=component.max_model_len or None,
    )
