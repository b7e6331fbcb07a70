"""Assembles a simulated SGLang server from its parts and runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from kvrouter.engines.events.zmq_sockets import EventSockets
from kvrouter.mocker.app import make_drivers
from kvrouter.mocker.driver import Publish
from kvrouter.mocker.rooms import PrefillRooms
from kvrouter.mocker.serving.http import ServedEngine, address_of, running, serving_engine_api
from kvrouter.mocker.serving.kv_events import of_rank
from kvrouter.mocker.serving.service import EngineService
from kvrouter.mocker.settings import MockerSettings
from kvrouter.mocker.sglang.errors import error_body
from kvrouter.mocker.sglang.events import SglangPublisher, describe, make_sockets
from kvrouter.mocker.sglang.load import TOPIC, LoadPublisher, base_endpoint
from kvrouter.mocker.sglang.server import SglangOptions, SglangServer, is_open
from kvrouter.runtime.process.lifecycle import StartRefused
from prometheus_client import CollectorRegistry


@asynccontextmanager
async def serving_sglang(settings: MockerSettings, registry: CollectorRegistry) -> AsyncIterator[ServedEngine]:
    """Serves the engine as SGLang does while the context lasts; yields the server.

    Raises:
        ValueError: no engine could run with these settings.
        InvalidConfig: an address of the events cannot be listened on.
        BindFailed: an address cannot be listened on.
        StartRefused: several ranks are to take free ports.
    """
    host, _ = address_of(settings.bind)
    _check_ports(settings)
    async with AsyncExitStack() as stack:
        sockets: dict[int, EventSockets] = {}
        if settings.kv_events is not None:
            for dp_rank in range(settings.dp_size):
                sockets[dp_rank] = stack.enter_context(make_sockets(settings.kv_events, dp_rank, host=host))

        load_sockets: dict[int, EventSockets] = {}
        if settings.kv_events is not None and settings.load_publish_endpoint:
            base = base_endpoint(settings.load_publish_endpoint, settings.kv_events, settings.dp_size)
            for dp_rank in range(settings.dp_size):
                endpoint = of_rank(base, dp_rank, host)
                load_sockets[dp_rank] = stack.enter_context(EventSockets(endpoint, topic=TOPIC, buffer_steps=1))

        def publishing(dp_rank: int) -> Publish:
            if dp_rank not in sockets:
                return lambda _: None
            return SglangPublisher(sockets[dp_rank], dp_rank, settings.block_size).publish

        drivers = make_drivers(settings, settings.worker_id or 0, registry, publishing, lambda out: service.emit(out))
        service = EngineService(drivers)
        config = drivers[0].engine.config
        rooms, bootstrap_port = PrefillRooms(), settings.disaggregation_bootstrap_port
        if settings.role == "prefill":
            bootstrap_port = await stack.enter_async_context(
                rooms.serving(host, settings.disaggregation_bootstrap_port, registry)
            )
        kv_events = None
        if settings.kv_events is not None:
            kv_events = describe(
                settings.kv_events,
                sockets[0],
                load_sockets.get(0),
                block_size=settings.block_size,
                dp_size=settings.dp_size,
            )
        options = SglangOptions(
            model=settings.model,
            model_path=settings.model_path or settings.model,
            role=settings.role,
            context_length=config.length_limit,
            lora_modules=dict(settings.lora_modules),
            reports_cached_tokens=settings.enable_prompt_tokens_details,
            incremental_streaming=settings.incremental_streaming_output,
            server_info={
                "host": host,
                "page_size": settings.block_size,
                "dp_size": settings.dp_size,
                "tp_size": 1,
                "max_total_num_tokens": config.capacity_tokens,
                "max_running_requests": settings.max_sequences * settings.dp_size,
                "internal_states": [
                    {"effective_max_running_requests_per_dp": settings.max_sequences} for _ in range(settings.dp_size)
                ],
                "chunked_prefill_size": settings.max_batched_tokens,
                "disaggregation_bootstrap_port": bootstrap_port,
                "kv_events": kv_events,
            },
        )
        await stack.enter_async_context(running([driver.run() for driver in drivers.values()]))
        await stack.enter_async_context(running([LoadPublisher(load_sockets, drivers).run()] if load_sockets else []))
        server = SglangServer(options, service, rooms)
        address = await stack.enter_async_context(
            serving_engine_api(settings, server.routes(), error_body, is_open, registry)
        )
        yield ServedEngine(f"http://{address}", service)


def _check_ports(settings: MockerSettings) -> None:
    """Raises StartRefused if ``/server_info``, which names the ports of rank 0, could not say where all ranks are."""
    config = settings.kv_events
    if config is None or settings.dp_size == 1:
        return
    for endpoint in (config.endpoint, config.replay_endpoint, settings.load_publish_endpoint):
        if endpoint and endpoint.endswith(":0"):
            raise StartRefused(f"{endpoint}: SGLang's ranks have successive ports, so name that of rank 0")
