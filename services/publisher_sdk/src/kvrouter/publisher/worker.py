"""The interface for engine authors: an ``async with`` to register a worker, serve it and publish its events."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrouter.net.auth import ServiceToken
from kvrouter.net.logs import get_logger
from kvrouter.net.ticks import seconds_to_send
from kvrouter.net.tls import Tls
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidLoad, UnknownRank
from kvrouter.publisher.publishing.published_loads import PublishedLoads
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.publishing.rank_stats import RankStats
from kvrouter.publisher.publishing.transport import TransportAway
from kvrouter.publisher.registration import EtcdAndNats, System
from kvrouter.publisher.serving.engine import Engine, PublishOnly, StepEngine, packed_prompt
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.snapshots.rank_file import Recovered
from kvrouter.publisher.snapshots.resume import claimed, files, recover_worker
from kvrouter.publisher.worker_server import ModelFiles, WorkerServer
from kvrouter.v1.common_pb2 import Rank, Transport
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import GetLoadResponse

if TYPE_CHECKING:
    from kvrouter.publisher.serving.request_spans import RequestSpans

__all__ = [
    "Engine",
    "PublisherStats",
    "RankPublisher",
    "RankStats",
    "RequestOutput",
    "StepEngine",
    "Worker",
    "WorkerConfig",
    "packed_prompt",
    "running",
]

log = get_logger(__name__)

_DEREGISTER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Statistics of a worker since it started."""

    worker_id: int
    ranks: Mapping[int, RankStats]
    """By data-parallel rank."""
    registered: bool
    """Whether the registration is in etcd, as far as is known."""
    registrations: int
    """Number of registrations; above 1 if etcd was away for longer than the lease or lost its data."""
    nats_connected: bool
    requests: int
    """Running requests."""
    load_reports_sent: int
    draining: bool
    """Whether the worker is stopping."""


class Worker:
    """A registered worker. Created by ``running``."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: StepEngine | Engine,
        incarnation: int,
        transport: Transport,
        recovered: Mapping[int, Recovered],
        model_files: ModelFiles,
        system: System,
    ) -> None:
        """``incarnation`` and ``transport`` were settled with ``system``.

        ``recovered`` has the states to resume from; ``model_files`` are those of the model's tokenizer.
        """
        component = config.component
        self.config = config
        self.incarnation = incarnation
        """Incarnation of the cache, new or resumed."""
        self.resumed = bool(recovered)
        """Whether the worker resumed from its snapshots while the engine continued."""
        self.transport = transport
        """Transport of its events."""
        self.endpoint = ""
        """Address under which others reach its WorkerService."""
        self._engine = engine
        kept = files(config, recovered)
        self._ranks = {
            rank: RankPublisher(
                subject=(
                    component.live_subject(config.worker_id, rank)
                    if transport == Transport.TRANSPORT_CORE_NATS
                    else component.events_subject(config.worker_id, rank)
                ),
                worker_id=config.worker_id,
                dp_rank=rank,
                incarnation=incarnation,
                block_size=config.block_size,
                copy_counting=config.copy_counting,
                total_blocks=config.ranks[rank],
                buffer_events=config.buffer_events,
                buffer_bytes=config.buffer_bytes,
                file=kept.get(rank),
                state_seconds=config.state_seconds,
            )
            for rank in sorted(config.ranks)
        }
        self.server = WorkerServer(
            engine,
            self._ranks,
            lambda: load_response(config, self.load_reports()),
            Tls.of(config.tls),
            ServiceToken.of(config.service_token_file, of_worker=True),
            model_files,
            structured_output=config.structured_output,
            spans=_spans(config),
        )
        """The gRPC server, with its counts: refused callers, and the use of its bounds."""
        self._link = system.link(config)
        self._keys = system.keys(config, incarnation)
        self._registered_unix_ns = time.time_ns()
        self._model_files = model_files.described
        self._published_loads = PublishedLoads()
        self._load_reports_sent = 0
        self._report_numbers = itertools.count(1)
        self._draining = False
        self.is_accepting = True
        """Whether the worker is announced as taking requests, unless it is stopping."""
        self._leasing: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []

    def rank(self, dp_rank: int = 0) -> RankPublisher:
        """Returns the object to report a rank's cache changes to.

        Raises:
            UnknownRank: the configuration has no such rank.
        """
        try:
            return self._ranks[dp_rank]
        except KeyError:
            raise UnknownRank(dp_rank, self._ranks) from None

    def emit(self, outputs: Iterable[RequestOutput]) -> None:
        """Passes the outputs of one engine step to their callers.

        Callable from any thread; never blocks. The outputs of a step for one gateway travel in one message. Outputs of
        ended requests are dropped. The iterable is read later, so it must not be changed.
        """
        self.server.emit(outputs)

    async def registered(self) -> None:
        """Waits until the registration is in etcd."""
        await self._keys.wait_registered()

    def set_accepting(self, accepting: bool) -> None:
        """Announces whether the worker takes requests, such as when its engine is away. Events are published anyway."""
        self.is_accepting = accepting
        if self.endpoint and not self._draining:
            self._register()

    def set_lora_names(self, names: Sequence[str]) -> None:
        """Announces the engine's current LoRA adapters."""
        if tuple(names) == self.config.lora_names:
            return
        self.config = replace(self.config, lora_names=tuple(names))
        if self.endpoint and not self._draining:
            self._register()

    async def flush(self) -> None:
        """Waits until all recorded events are sent."""
        for rank in self._ranks.values():
            await rank.flush()

    def load_reports(self) -> list[LoadReport]:
        """Returns every rank's load from the engine, with rank, incarnation and time."""
        return load_reports(self._engine, self.config, self.incarnation, next(self._report_numbers))

    async def report_load(self) -> None:
        """Publishes the loads that have changed, and others every few seconds; they are lost while NATS is away."""
        now, sequence, measured_unix_ns = time.monotonic(), next(self._report_numbers), time.time_ns()
        for dp_rank, load in _loads(self._engine, self.config):
            taken = _taken(load)
            # Before it is completed, which costs more than the rest: most loads are no news.
            if not self._published_loads.is_news(dp_rank, taken, now):
                continue
            subject = self.config.component.load_subject(self.config.worker_id, dp_rank)
            report = _completed(dp_rank, taken, self.config, self.incarnation, sequence, measured_unix_ns)
            with contextlib.suppress(TransportAway):
                await self._link.publish(subject, report.SerializeToString())
                self._published_loads.published(dp_rank, taken, now)
                self._load_reports_sent += 1

    def stats(self) -> PublisherStats:
        """Returns the current statistics."""
        return PublisherStats(
            worker_id=self.config.worker_id,
            ranks={dp_rank: rank.stats() for dp_rank, rank in self._ranks.items()},
            registered=self._keys.registered,
            registrations=self._keys.registrations,
            nats_connected=self._link.connected,
            requests=self.server.requests,
            load_reports_sent=self._load_reports_sent,
            draining=self._draining,
        )

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        port = await self.server.start(self.config.bind)
        self.endpoint = self.config.endpoint(port)
        loop = asyncio.get_running_loop()

        def register_soon() -> None:
            loop.call_soon_threadsafe(self._register)

        for rank in self._ranks.values():
            rank.on_partial = register_soon
        self._register()
        self._leasing = tasks.create_task(self._keys.run())
        self._background.append(tasks.create_task(self._link.run()))
        if self.config.load_report_seconds:
            self._background.append(tasks.create_task(self._report_load()))
        for rank in self._ranks.values():
            self._background.append(tasks.create_task(rank.save_periodically()))
        if self.config.publishes_events:
            transport = self._link.transport(self.transport, self.config.component)
            for rank in self._ranks.values():
                sending = rank.run(
                    transport, heartbeat_seconds=self.config.heartbeat_seconds, max_batch_bytes=lambda: self._link.room
                )
                self._background.append(tasks.create_task(sending))
        log.info(
            "worker.serving",
            worker_id=self.config.worker_id,
            component=str(self.config.component),
            endpoint=self.endpoint,
            incarnation=self.incarnation,
            transport=Transport.Name(self.transport),
            resumed=self.resumed,
        )

    async def _stop(self) -> None:
        """Refuses new requests, lets running ones finish, deregisters, sends unsent events, and closes."""
        try:
            self._draining = True
            self._register()
            await self.server.refuse_requests()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DEREGISTER_SECONDS):
                    await self._keys.wait_registered()
            await self.server.stop(self.config.drain_seconds)
            if self._leasing is not None:
                self._keys.stop()
                await asyncio.wait({self._leasing}, timeout=_DEREGISTER_SECONDS)
            if self.config.publishes_events:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.config.flush_seconds):
                        await self.flush()
            for rank in self._ranks.values():
                await rank.save()
            unsent = sum(rank.stats().unsent_events for rank in self._ranks.values())
            log.info("worker.stopping", worker_id=self.config.worker_id, unsent_events=unsent)
        finally:
            for rank in self._ranks.values():
                rank.on_partial = None
            for task in (*self._background, *([self._leasing] if self._leasing else ())):
                task.cancel()

    def _register(self) -> None:
        registration = self.config.registration(
            endpoint=self.endpoint,
            incarnation=self.incarnation,
            transport=self.transport,
            registered_unix_ns=self._registered_unix_ns,
        )
        registration.draining = self._draining or not self.is_accepting
        for rank in registration.ranks:
            rank.events_lost = self._ranks[rank.dp_rank].is_partial
        registration.serves_call_stream = True
        registration.model_files.extend(self._model_files)
        self._keys.put(self.config.component.worker_key(self.config.worker_id), registration.SerializeToString())

    async def _report_load(self) -> None:
        # Workers that start together do not report together.
        await asyncio.sleep(random.uniform(0, self.config.load_report_seconds))
        while True:
            try:
                await self.report_load()
            except Exception:
                # The exception comes from the engine's code. A failed load report must not end the worker.
                log.exception("load_report.failed", worker_id=self.config.worker_id)
            await asyncio.sleep(seconds_to_send(self.config.load_report_seconds))


def load_reports(
    engine: StepEngine | Engine, config: WorkerConfig, incarnation: int, sequence: int
) -> list[LoadReport]:
    """Returns every rank's load from the engine, with rank, incarnation, time and sequence number.

    Raises:
        InvalidLoad: the engine did not return a mapping from rank to LoadReport, or reported a cache of 0 blocks.
        UnknownRank: the configuration has no such rank.
    """
    measured_unix_ns = time.time_ns()
    return [
        _completed(dp_rank, load, config, incarnation, sequence, measured_unix_ns)
        for dp_rank, load in _loads(engine, config)
    ]


def _loads(engine: StepEngine | Engine, config: WorkerConfig) -> list[tuple[int, LoadReport]]:
    """Returns every rank's load as the engine has it, in order of the ranks."""
    loads: object = engine.load()
    if not isinstance(loads, Mapping):
        raise InvalidLoad(f"expected load() to return a mapping from rank to LoadReport, received {loads!r:.100}")
    for dp_rank, load in loads.items():
        if dp_rank not in config.ranks:
            raise UnknownRank(dp_rank, config.ranks)
        if not isinstance(load, LoadReport):
            raise InvalidLoad(f"expected a LoadReport for rank {dp_rank}, received {load!r:.100}")
        if not load.total_blocks and "total_blocks" in load:
            raise InvalidLoad(f"expected total_blocks of 1 or more, or unset, for rank {dp_rank}, received 0")
    return sorted(loads.items(), key=lambda each: each[0])


def _taken(load: LoadReport) -> LoadReport:
    """Returns a copy of a load, which an engine may change meanwhile, without what ``_completed`` sets anyway."""
    taken = LoadReport()
    taken.CopyFrom(load)
    for name in ("rank", "incarnation", "measured_unix_ns", "sequence"):
        taken.ClearField(name)
    return taken


def _completed(
    dp_rank: int, load: LoadReport, config: WorkerConfig, incarnation: int, sequence: int, measured_unix_ns: int
) -> LoadReport:
    report = LoadReport()
    report.CopyFrom(load)
    report.rank.CopyFrom(Rank(worker_id=config.worker_id, dp_rank=dp_rank))
    report.incarnation = incarnation
    report.measured_unix_ns = measured_unix_ns
    report.sequence = sequence
    if "total_blocks" not in report:
        report.MergeFrom(LoadReport(total_blocks=config.ranks[dp_rank]))
    return report


def _spans(config: WorkerConfig) -> RequestSpans | None:
    if config.tracer is None:
        return None
    # Imported only here, since the SDK does not require OpenTelemetry.
    from kvrouter.publisher.serving.request_spans import RequestSpans

    return RequestSpans(config.tracer, config.worker_id)


def load_response(config: WorkerConfig, reports: Sequence[LoadReport]) -> GetLoadResponse:
    """Returns the response of GetLoad, with model and block size of the worker."""
    return GetLoadResponse(
        reports=reports,
        model=config.model,
        block_size=config.block_size,
        serves_call_stream=True,
        serves_structured_output=config.structured_output,
    )


@asynccontextmanager
async def running(
    config: WorkerConfig,
    engine: StepEngine | Engine | None = None,
    system: System | None = None,
    *,
    recovered: Mapping[int, Recovered] | None = None,
) -> AsyncIterator[Worker]:
    """Runs a worker while the body lasts. Waits for etcd at the start, but not for NATS.

    Args:
        config: The worker.
        engine: Serves its requests; without one it publishes only, for an engine whose requests travel elsewhere.
        system: Where it registers and publishes; by default the etcd and the NATS of the configuration.
        recovered: Its states, if the caller has claimed and read them; by default they are claimed and read here.

    Raises:
        DescriptorMismatch: the worker does not fit its component; also later, out of the body.
        KeyTaken: another process registered the same worker; out of the body.
        InvalidConfig: ``bind`` cannot be listened on, or another process keeps this worker in ``state``.
    """
    with claimed(config) if recovered is None else nullcontext():
        if recovered is None:
            recovered = (await asyncio.to_thread(recover_worker, config))[0] if config.state else {}
        former = next((found.incarnation for found in recovered.values()), None)
        system = system or EtcdAndNats()
        incarnation, transport = await system.settle(config, former)
        resumed = recovered if incarnation == former else {}
        system.offer(config, resumed)
        for state in recovered.values():
            state.chunks.clear()  # the recorder has the blocks, too
        model_files = await ModelFiles.of(config)
        worker = Worker(config, engine or PublishOnly(), incarnation, transport, resumed, model_files, system)
        try:
            async with asyncio.TaskGroup() as tasks:
                await worker._start(tasks)  # noqa: SLF001 - its class is above
                try:
                    yield worker
                finally:
                    await worker._stop()  # noqa: SLF001 - its class is above
        except BaseExceptionGroup as group:
            # Callers want to catch a single failure by its type.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise
