"""Assembles a Frontend from its parts and runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
import structlog
from kvrouter.frontend.access.caller import current_caller
from kvrouter.frontend.access.client_bookings import ClientBookings
from kvrouter.frontend.access.opening import open_access
from kvrouter.frontend.access.quotas import LimitTable
from kvrouter.frontend.access.request_admission import OverloadBounds, OverloadLimits, RequestAdmission
from kvrouter.frontend.http_api import HttpApi
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.proxy.prompt_comparison import PromptComparison
from kvrouter.frontend.recording.popular_prefixes import PopularPrefixes
from kvrouter.frontend.recording.recorder import Recorder, RecordingFile
from kvrouter.frontend.request.gen_ai import GenAiMetrics
from kvrouter.frontend.request.model_choice import ModelChoices
from kvrouter.frontend.request.model_rules import ModelFileError
from kvrouter.frontend.request.prefill_attempt import MAX_ABORTS
from kvrouter.frontend.request.prefill_stage import Disaggregation
from kvrouter.frontend.request.request_runner import RequestRunner
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.schedulers.booking_updates import MAX_UPDATES
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.frontend.schedulers.scheduler_choice import RemoteSchedulers, SchedulerSource
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.text.client_work import ClientWork, Owner
from kvrouter.frontend.text.model_files import fetch_files
from kvrouter.frontend.text.text_models import TextModels
from kvrouter.frontend.web.routes import open_page
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.failures import MAX_WATCHERS
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.poison_prompts import MAX_ENTRIES, PoisonPrompts
from kvrouter.frontend.workers.probes import StallTrials, WorkerProbes
from kvrouter.frontend.workers.shared_deaths import MAX_UNCONFIRMED, SharedDeaths
from kvrouter.runtime import http_server
from kvrouter.runtime.bounds import bounds_of
from kvrouter.runtime.contracts import Frontend, Indexer, Scheduler
from kvrouter.runtime.http_server import HttpLimits, share_of_descriptors
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.v1.message_limits import DEFAULT_LIMITS, MessageLimits
from kvrouter.v1.names import worker_deaths_subject
from prometheus_client import CollectorRegistry

_READY_SECONDS = 5.0
_READINESS_SECONDS = 0.05
"""Interval of readiness checks."""

log = structlog.get_logger(component="frontend")


@asynccontextmanager
async def running(
    settings: FrontendSettings,
    runtime: Runtime,
    schedulers: SchedulerSource,
    indexer: Indexer | None = None,
    shared_limits: LimitTable | None = None,
) -> AsyncIterator[FrontendService]:
    """Runs a Frontend with its Scheduler sessions and worker probes while the context lasts; yields the service.

    ``indexer`` is one in this process, which is asked instead of the registered ones. ``shared_limits`` has
    the counters of limits shared with other processes.
    """
    metrics = FrontendMetrics(runtime.registry)
    links = SchedulerLinks(
        runtime.directory,
        schedulers,
        instance_id=runtime.instance_id,
        sharding=settings.sharding,
        heartbeat_timeout_seconds=settings.scheduler_heartbeat_timeout_seconds,
        tenant=_tenant_of_caller if settings.api_keys or settings.jwt_keys else None,
    )
    pool = WorkerPool(runtime.instance_id, counts=runtime.call_streams.client("worker"), tls=runtime.tls)
    back_off = BackOff(
        settings.worker_back_off_failures, settings.worker_back_off_seconds, settings.worker_back_off_max_seconds
    )
    health = WorkerHealth(
        back_off, max_missed=settings.worker_probe_failures, stall_seconds=settings.worker_stall_seconds
    )
    worker_client = WorkerClient(pool, health, metrics)
    trials = StallTrials(worker_client)
    probes = WorkerProbes(runtime.directory, pool, health, trials, interval_seconds=settings.worker_probe_seconds)
    metrics.suspected_workers.set_function(lambda: health.suspected)
    metrics.stalled_workers.set_function(lambda: health.stalled)
    metrics.backed_off_workers.set_function(lambda: health.backed_off)
    metrics.worker_channels.set_function(lambda: len(pool))
    bounds = bounds_of(runtime.registry)
    bounds.add("worker_channels", lambda: len(pool), pool.max_connections, when_full="evicts")
    bounds.add("booking_updates", lambda: links.most_waiting_updates, MAX_UPDATES, when_full="drops")
    recorder: Recorder | None = None
    if settings.record:
        recorder = Recorder(RecordingFile(Path(settings.record), settings.record_max_bytes), runtime.registry)
    work = ClientWork(runtime.registry, _owner_of_work)
    texts = TextModels(
        runtime.directory,
        lambda files, workers: fetch_files(files, workers, runtime.tls),
        {model: Path(directory) for model, directory in settings.tokenizers.items()},
        runtime.registry,
        work=work,
        cache_bytes=settings.tokenizer_cache_bytes,
        pinned_files=settings.pinned_files(),
        tool_call_formats=settings.tool_call_parsers,
        reasoning_formats=settings.reasoning_parsers,
    )
    indexers = IndexerClient(runtime.directory, indexer)
    opened = open_access(settings, runtime.registry, shared_limits)
    access = None if opened is None else opened.access
    disaggregation = Disaggregation(runtime.directory, links, metrics)
    bounds.add("abandoned_prefills", lambda: disaggregation.abandoned.pending, MAX_ABORTS, when_full="drops")
    bounded = OverloadLimits(settings.max_requests_in_flight, settings.max_prompt_bytes_in_flight, settings.max_work)
    admission = RequestAdmission(access, OverloadBounds(bounded, runtime.registry))
    models = ServedModels(runtime.directory, texts, access)
    poison_prompts = PoisonPrompts(settings.poison_prompt_seconds, metrics=metrics)
    bounds.add("poison_prompts", lambda: len(poison_prompts), MAX_ENTRIES, when_full="evicts")
    shared_deaths: SharedDeaths | None = None
    if runtime.etcd is not None:
        subject = worker_deaths_subject(settings.namespace)
        shared_deaths = SharedDeaths(
            poison_prompts,
            runtime.nats,
            subject,
            runtime.quarantine,
            frontend_id=runtime.instance_id,
            frontends=lambda: runtime.directory.services("frontend").keys(),
        )
        bounds.add("death_notices", lambda: shared_deaths.unconfirmed, MAX_UNCONFIRMED, when_full="drops")
    bounds.add("left_requests", lambda: health.most_watchers, MAX_WATCHERS, when_full="drops")
    runner = RequestRunner(
        models,
        links,
        worker_client,
        metrics,
        settings,
        recorder=recorder,
        popular_prefixes=PopularPrefixes() if settings.web_page else None,
        access=access,
        admission=admission,
        disaggregation=disaggregation,
        poison_prompts=poison_prompts,
        gen_ai=GenAiMetrics(runtime.registry),
    )
    choices = _open_models(settings, models, health, runtime.registry)
    bookings = ClientBookings(settings, access, runtime.registry)
    prompts = PromptComparison(runtime.directory, texts, settings.engine_keys, runtime.registry)
    service = FrontendService(runtime.directory, runner, indexers, bookings, prompts, choices)
    async with asyncio.TaskGroup() as group:
        endless = {
            "scheduler-links": links.run(),
            "worker-probes": probes.run(),
            "tokenizers": texts.run(),
            "prompt-comparison": prompts.run(),
            "models-file": choices.run(),
            "abandoned-prefills": disaggregation.abandoned.run(),
        }
        if opened is not None:
            endless["access"] = opened.run()
        if shared_deaths is not None:
            endless["shared-deaths"] = shared_deaths.run()
        tasks = [group.create_task(each, name=name) for name, each in endless.items()]
        if recorder is not None:
            group.create_task(recorder.run(), name="recording")
        try:
            async with _serving_endpoint_picker(runtime, runner, choices):
                yield service
        finally:
            for task in tasks:
                task.cancel()
            if recorder is not None:
                recorder.stop()
            await pool.close()
            await indexers.close()
            work.close()


def _open_models(
    settings: FrontendSettings, models: ServedModels, health: WorkerHealth, registry: CollectorRegistry
) -> ModelChoices:
    """Reads the file of models.

    Raises:
        StartRefused: it cannot be used.
    """
    try:
        return ModelChoices(Path(settings.models_file) if settings.models_file else None, models, health, registry)
    except ModelFileError as error:
        raise StartRefused(f"--models-file: {error}") from None


@asynccontextmanager
async def _serving_endpoint_picker(
    runtime: Runtime, runner: RequestRunner, choices: ModelChoices
) -> AsyncIterator[None]:
    """Serves the endpoint picker while the context lasts, if its address is set.

    Raises:
        StartRefused: the messages of external processing are not installed.
        BindFailed: the address cannot be listened on.
    """
    if not runner.settings.endpoint_picker_bind:
        yield
        return
    # Imported only here, since its messages are an extra.
    try:
        from kvrouter.frontend.proxy.endpoint_picker.picker import Picker
        from kvrouter.frontend.proxy.endpoint_picker.server import serving_picker
    except ModuleNotFoundError as error:
        raise StartRefused(f"the endpoint picker needs {error.name}: install kvrouter[envoy]") from None
    async with aiohttp.ClientSession() as session:
        picker = Picker(runtime.directory, runner, choices, session)
        async with serving_picker(picker, runtime.registry, runtime.tls):
            yield


def request_limits(settings: FrontendSettings) -> MessageLimits:
    """Returns the size limits of a gRPC request to a Frontend.

    They are half of what Scheduler and worker accept, because the requests the Frontend sends them are larger.
    """
    return MessageLimits(settings.max_prompt_tokens, DEFAULT_LIMITS.besides_bytes // 2, DEFAULT_LIMITS.records // 2)


@dataclass(frozen=True, slots=True)
class SharedPorts:
    """Serving of a process that shares its ports with others of the same Frontend."""

    metrics: Callable[[], Awaitable[bytes]]
    """Returns the metrics of all processes."""
    waits_until_ready: bool
    """Whether to listen only when requests can be routed, or after 5 seconds, since others serve meanwhile."""
    limits: LimitTable
    """Counters of the limits of keys and tenants."""


@asynccontextmanager
async def serving_http(
    service: FrontendService,
    settings: FrontendSettings,
    runtime: Runtime,
    shared: SharedPorts | None = None,
    *,
    scheduler: Scheduler | None = None,
) -> AsyncIterator[str]:
    """Serves the HTTP API while the context lasts; yields its address, host:port.

    A client that disconnects cancels its request. When the context ends, running requests may finish. ``scheduler`` is
    one of this process not registered; the web page shows it.

    Raises:
        BindFailed: the port is in use or the address is not one of this machine's.
    """
    metrics = None if shared is None else shared.metrics
    limits = HttpLimits(settings.http_max_connections or share_of_descriptors(1 / 2), settings.http_header_seconds)
    async with open_page(
        runtime,
        service.indexers,
        service.runner.metrics,
        service.runner.popular_prefixes,
        cast(Frontend, service),
        scheduler,
        asks_frontends=service.access is None,
    ) as page:
        api = HttpApi(service, runtime.registry, metrics=metrics, page=page)
        async with http_server.serving_http(
            api.application(),
            settings.host,
            settings.port,
            limits,
            runtime.registry,
            name="frontend",
            reuse_port=shared is not None,
            tls=runtime.tls,
            recognizes=None if service.access is None else service.access.recognizes,
            posted=api.posted,
            handler_cancellation=True,
            auto_decompress=False,
            shutdown_timeout=settings.drain_seconds,
        ) as (host, port):
            log.info("http.listening", address=f"{host}:{port}", encrypted=runtime.tls is not None)
            yield f"{host}:{port}"


async def serve(
    settings: FrontendSettings,
    stopping: asyncio.Event,
    shared: SharedPorts | None = None,
    *,
    started: Callable[[CollectorRegistry, Callable[[], bool]], None] | None = None,
) -> None:
    """Runs a Frontend over HTTP and gRPC until ``stopping`` is set, then drains.

    Args:
        settings: The options.
        stopping: Event to stop it.
        shared: Set if other processes share the ports.
        started: Called when it listens, with its metrics and with what returns whether it is ready.

    Raises:
        BindFailed: an address cannot be listened on.
    """
    async with (
        open_runtime(settings) as runtime,
        aclosing(
            RemoteSchedulers(
                runtime.directory, client_name=runtime.instance_id, counts=runtime.call_streams.client("scheduler")
            )
        ) as schedulers,
        running(settings, runtime, schedulers, shared_limits=None if shared is None else shared.limits) as service,
    ):
        if shared is not None and shared.waits_until_ready:
            await _until_ready(service, stopping)
        async with serving_http(service, settings, runtime, shared) as http_address:
            limits = request_limits(settings)
            hosted = Hosted("frontend", service, service.ready, http_address, limits, guard=service.access)
            await host(
                runtime,
                [hosted],
                stopping,
                started=started and (lambda _: started(runtime.registry, service.ready)),
                reuse_port=shared is not None,
            )


async def _until_ready(service: FrontendService, stopping: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_READY_SECONDS):
            while not service.ready() and not stopping.is_set():  # noqa: ASYNC110 - readiness is only polled
                await asyncio.sleep(_READINESS_SECONDS)


def _owner_of_work() -> Owner:
    caller = current_caller()
    return (
        Owner() if caller is None else Owner(caller.tenant or f"key {caller.name}", caller.weight, caller.cache_tenant)
    )


def _tenant_of_caller() -> tuple[str, float]:
    caller = current_caller()
    return ("", 1.0) if caller is None else (caller.tenant, caller.weight)
