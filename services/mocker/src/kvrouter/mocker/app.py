"""Assembles a simulated worker from its parts and runs it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kvrouter.mocker.adapter import MockEngine, emit_to, publish_to
from kvrouter.mocker.answers import Answers
from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.driver import Emit, EngineDriver, Publish
from kvrouter.mocker.engine.config import EngineConfig, TierConfig
from kvrouter.mocker.engine.implementation import make_engines
from kvrouter.mocker.handover import Handover
from kvrouter.mocker.logprobs import Logprobs
from kvrouter.mocker.metrics import Loads, lateness_histogram
from kvrouter.mocker.poison import Poison
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.tiers import storage_tiers
from kvrouter.net.model_files import TOKENIZER
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import DescriptorMismatch
from kvrouter.publisher.registration import System
from kvrouter.runtime.config.fields import ROLES, TRANSPORTS
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.runtime.telemetry.connection_metrics import CallerMetrics, expose_servers
from kvrouter.runtime.tracing import tracer
from kvrouter.v1.names import ComponentName
from prometheus_client import CollectorRegistry

_VOCABULARY = 1 << 16
"""Least number of token ids of a simulated model, which draws its output from fewer: replayed traces have as many."""


def engine_config(settings: MockerSettings, worker_id: int, dp_rank: int) -> EngineConfig:
    """Returns the configuration of one rank's engine.

    Raises:
        ValueError: no engine could run with these settings.
    """
    return EngineConfig(
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_batched_tokens=settings.max_batched_tokens,
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        max_model_tokens=settings.max_model_len or None,
        speed=settings.speed,
        vocabulary_size=settings.vocabulary_size,
        mean_output_tokens=settings.mean_output_tokens,
        hash_seed=(worker_id * 0x9E3779B97F4A7C15 + (0 if settings.shared_blocks else dp_rank)) % (1 << 64),
        host=TierConfig(settings.host_blocks, settings.host_gb_per_second, settings.host_latency_ms),
        shared=TierConfig(settings.shared_blocks, settings.shared_gb_per_second, settings.shared_latency_ms),
        kv_bytes_per_token=settings.kv_bytes_per_token,
    )


def worker_config(settings: MockerSettings, worker_id: int) -> WorkerConfig:
    """Returns the worker's configuration for the SDK.

    Raises:
        InvalidConfig: a setting is out of range.
    """
    engine = engine_config(settings, worker_id, 0)
    return WorkerConfig(
        component=ComponentName(settings.namespace, settings.component),
        model=settings.model,
        block_size=settings.block_size,
        ranks=dict.fromkeys(range(settings.dp_size), settings.num_blocks),
        worker_id=worker_id,
        etcd=settings.etcd_access(),
        nats=settings.nats_access(),
        bind=settings.bind,
        advertise=settings.advertise,
        tls=settings.tls_options(),
        service_token_file=settings.service_token_file,
        transport=TRANSPORTS["core-nats" if settings.enable_local_indexer else settings.transport],
        role=ROLES[settings.role],
        labels=settings.labels,
        tokenizer=settings.tokenizer,
        structured_output=_has_tokenizer(settings),
        publishes_events=settings.events,
        reads_shared_storage=settings.shared_blocks > 0,
        storage_tiers=tuple(storage_tiers(engine)),
        max_batched_tokens=settings.max_batched_tokens,
        max_sequences=settings.max_sequences,
        vocabulary_size=max(_VOCABULARY, settings.vocabulary_size) if settings.tokenizer else None,
        max_model_len=engine.length_limit,
        heartbeat_seconds=settings.heartbeat_seconds,
        load_report_seconds=settings.load_report_seconds,
        lease_ttl_seconds=settings.lease_seconds,
        drain_seconds=settings.drain_seconds,
        tracer=tracer(),
    )


def make_answers(settings: MockerSettings) -> Answers | None:
    """Returns the outputs that are not drawn; None for a worker without a tokenizer.

    Raises:
        StartRefused: the tokenizer cannot be read.
    """
    if not _has_tokenizer(settings):
        return None
    try:
        return Answers(settings.tokenizer)
    except Exception as error:  # the library raises nothing narrower
        raise StartRefused(f"the tokenizer in {settings.tokenizer} cannot be read: {error}") from None


def _has_tokenizer(settings: MockerSettings) -> bool:
    return bool(settings.tokenizer) and (Path(settings.tokenizer) / TOKENIZER).is_file()


def worker_id_of(settings: MockerSettings) -> int:
    """Returns the configured worker id, or a random one."""
    return settings.worker_id if settings.worker_id is not None else secrets.randbits(53) | 1


def make_drivers(
    settings: MockerSettings,
    worker_id: int,
    registry: CollectorRegistry | None,
    publishing: Callable[[int], Publish],
    emit: Emit,
) -> dict[int, EngineDriver]:
    """Creates each rank's engine with its metrics.

    Args:
        settings: The mocker's settings.
        worker_id: Id of the worker.
        registry: Registry for the metrics; None for none.
        publishing: Returns the receiver of a rank's cache events.
        emit: Receives the outputs of each step.
    """
    clock = EngineClock(settings.clock_factor)
    observe_lateness = (lambda _: None) if registry is None else lateness_histogram(registry).observe
    engines = make_engines(engine_config(settings, worker_id, dp_rank) for dp_rank in range(settings.dp_size))
    drivers = {
        dp_rank: EngineDriver(
            engine,
            clock,
            publishing(dp_rank),
            emit,
            stream_interval=settings.stream_interval,
            observe_lateness=observe_lateness,
            poison=None if settings.poison_token is None else Poison(settings.poison_token, settings.poison_effect),
        )
        for dp_rank, engine in enumerate(engines)
    }
    if registry is not None:
        registry.register(Loads(drivers))
    return drivers


def make_handover(settings: MockerSettings, registry: CollectorRegistry) -> Handover | None:
    """Returns what hands prompts over to or from other workers; None for a worker with both roles."""
    if settings.role == "both":
        return None
    transfer = KvTransfer(
        settings.kv_bytes_per_token, settings.kv_transfer_gb_per_second, settings.kv_transfer_latency_ms
    )
    return Handover(
        block_size=settings.block_size,
        transfer=transfer,
        lease_seconds=settings.kv_lease_seconds,
        concurrent=settings.handover == "concurrent" and settings.role == "prefill",
        clock_factor=settings.clock_factor,
        registry=registry,
    )


@asynccontextmanager
async def running(
    settings: MockerSettings, registry: CollectorRegistry | None, system: System | None = None
) -> AsyncIterator[sdk.Worker]:
    """Runs a simulated worker, registered and serving, while the context lasts; by default in a system of its own.

    Without a registry it has no metrics.

    Raises:
        ValueError: no engine could run with these settings.
        StartRefused: the worker does not match its component's descriptor.
    """
    worker_id = worker_id_of(settings)
    publishers: dict[int, sdk.RankPublisher] = {}
    worker: sdk.Worker
    config = worker_config(settings, worker_id)
    handover = make_handover(settings, CollectorRegistry() if registry is None else registry)
    emit = lambda outputs: worker.emit(outputs)  # noqa: E731 - the worker follows
    logprobs = Logprobs()
    finish = [logprobs.add_to] if handover is None else [logprobs.add_to, handover.finish]
    answers = make_answers(settings)
    drivers = make_drivers(
        settings,
        worker_id,
        registry,
        lambda dp_rank: publish_to(lambda: publishers[dp_rank]),
        emit_to(emit, *finish),
    )
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        if handover is not None:
            host, advertised = (address.rpartition(":")[0] for address in (settings.bind, config.endpoint(1)))
            await stack.enter_async_context(handover.serving(host, advertised))
            if settings.handover == "concurrent" and settings.role == "prefill":
                config = replace(config, bootstrap_endpoint=handover.address)
        stepping: list[asyncio.Task[None]] = []
        try:
            # The SDK stops first and lets requests finish, for which the engines must continue to step.
            engine = MockEngine(drivers, handover, emit, logprobs, answers)
            async with sdk.running(config, engine, system) as worker:
                if registry is not None:
                    CallerMetrics(registry, lambda: [worker.server.callers])
                    expose_servers(registry, lambda: [worker.server.grpc])
                for dp_rank, driver in drivers.items():
                    publishers[dp_rank] = worker.rank(dp_rank)
                    stepping.append(group.create_task(driver.run(), name=f"rank-{dp_rank}"))
                yield worker
        except DescriptorMismatch as error:
            raise StartRefused(str(error)) from error
        finally:
            for task in stepping:
                task.cancel()
