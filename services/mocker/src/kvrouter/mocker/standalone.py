"""A simulated worker that neither registers nor publishes.

It serves routers that list their workers (``--static-workers``) and use neither etcd nor NATS.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
from kvrouter.mocker.adapter import MockEngine, emit_to
from kvrouter.mocker.app import make_answers, make_drivers, worker_config, worker_id_of
from kvrouter.mocker.settings import MockerSettings
from kvrouter.net.auth import ServiceToken
from kvrouter.net.tls import Tls
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.worker import load_reports, load_response
from kvrouter.publisher.worker_server import WorkerServer
from kvrouter.runtime.telemetry.connection_metrics import CallerMetrics, expose_servers
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="mocker")


@asynccontextmanager
async def serving_alone(settings: MockerSettings, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serves a simulated worker while the context lasts; yields its address, host:port.

    Raises:
        ValueError: no engine could run with these settings.
        InvalidConfig: the address cannot be listened on.
    """
    worker_id, incarnation = worker_id_of(settings), time.time_ns()
    config = worker_config(settings, worker_id)
    drivers = make_drivers(
        settings, worker_id, registry, lambda _: lambda _: None, emit_to(lambda outputs: server.emit(outputs))
    )
    engine = MockEngine(drivers, answers=make_answers(settings))
    ranks = {
        dp_rank: RankPublisher(
            subject="", worker_id=worker_id, dp_rank=dp_rank, incarnation=incarnation, block_size=config.block_size
        )
        for dp_rank in drivers
    }
    numbers = itertools.count(1)
    server = WorkerServer(
        engine,
        ranks,
        lambda: load_response(config, load_reports(engine, config, incarnation, next(numbers))),
        Tls.of(config.tls),
        ServiceToken.of(config.service_token_file, of_worker=True),
    )
    CallerMetrics(registry, lambda: [server.callers])
    expose_servers(registry, lambda: [server.grpc])
    async with asyncio.TaskGroup() as group:
        stepping = [group.create_task(driver.run(), name=f"rank-{dp_rank}") for dp_rank, driver in drivers.items()]
        try:
            endpoint = config.endpoint(await server.start(config.bind))
            log.info("worker.serving_alone", worker_id=worker_id, endpoint=endpoint)
            try:
                yield endpoint
            finally:
                await server.refuse_requests()
                await server.stop(config.drain_seconds)
        finally:
            for task in stepping:
                task.cancel()
