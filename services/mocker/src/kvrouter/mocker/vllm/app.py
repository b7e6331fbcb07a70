"""Assembles a simulated vLLM server from its parts and runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvrouter.engines.events.zmq_publisher import ZmqPublisher
from kvrouter.mocker.app import make_drivers
from kvrouter.mocker.driver import Publish
from kvrouter.mocker.serving.http import ServedEngine, address_of, reachable, running, serving_engine_api
from kvrouter.mocker.serving.service import EngineService
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.vllm.errors import error_body
from kvrouter.mocker.vllm.events import make_publisher, publish_to, source
from kvrouter.mocker.vllm.media import SimulatedMedia
from kvrouter.mocker.vllm.server import VllmOptions, VllmServer, is_open
from kvrouter.mocker.vllm.transfers import KvTransfers
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def serving_vllm(settings: MockerSettings, registry: CollectorRegistry) -> AsyncIterator[ServedEngine]:
    """Serves the engine as vLLM does while the context lasts; yields the server.

    Raises:
        ValueError: no engine could run with these settings.
        InvalidConfig: an address of the events cannot be listened on.
        BindFailed: the address cannot be listened on.
    """
    host, _ = address_of(settings.bind)
    async with AsyncExitStack() as stack:
        media = SimulatedMedia(settings.model_path or settings.model)
        publishers: dict[int, ZmqPublisher] = {}
        if settings.kv_events is not None:
            for dp_rank in range(settings.dp_size):
                publisher = make_publisher(settings.kv_events, dp_rank, block_size=settings.block_size, host=host)
                publishers[dp_rank] = stack.enter_context(publisher)

        def publishing(dp_rank: int) -> Publish:
            if dp_rank not in publishers:
                return lambda _: None
            return publish_to(publishers[dp_rank], media, settings.block_size)

        drivers = make_drivers(settings, settings.worker_id or 0, registry, publishing, lambda out: service.emit(out))
        service = EngineService(drivers)
        options = VllmOptions(
            model=settings.model,
            model_path=settings.model_path or settings.model,
            max_model_len=next(iter(drivers.values())).engine.config.length_limit,
            max_sequences=settings.max_sequences,
            lora_modules=dict(settings.lora_modules),
            enable_prompt_tokens_details=settings.enable_prompt_tokens_details,
            priority_scheduling=settings.priority_scheduling,
            kv_event_sources={
                dp_rank: source(settings.kv_events, publisher)
                for dp_rank, publisher in publishers.items()
                if settings.kv_events is not None
            },
        )
        transfers = KvTransfers(role=settings.role, host=reachable(host), block_size=settings.block_size)
        await stack.enter_async_context(running([driver.run() for driver in drivers.values()]))
        server = VllmServer(options, service, transfers, media)
        address = await stack.enter_async_context(
            serving_engine_api(settings, server.routes(), error_body, is_open, registry)
        )
        transfers.port = address_of(address)[1]
        yield ServedEngine(f"http://{address}", service)
