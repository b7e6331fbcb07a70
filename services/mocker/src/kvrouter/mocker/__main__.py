"""Entry point of ``kvrouter-mocker``, a simulated engine as a worker or as an HTTP server.

Imports wait until more than its help is asked for.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from kvrouter.runtime.config.stored_help import exit_with_help


def main() -> None:
    """Runs the worker or the server until SIGTERM."""
    exit_with_help("mocker")
    from kvrouter.mocker.app import engine_config, running, worker_config
    from kvrouter.mocker.fleet import running_fleet
    from kvrouter.mocker.settings import MockerSettings
    from kvrouter.mocker.sglang.app import serving_sglang
    from kvrouter.mocker.standalone import serving_alone
    from kvrouter.mocker.vllm.app import serving_vllm
    from kvrouter.net.tls import Tls
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.config.sources import refuse
    from kvrouter.runtime.process.lifecycle import run
    from kvrouter.runtime.telemetry.health import HealthBoard
    from kvrouter.runtime.telemetry.metrics import new_registry, serving_ops
    from kvrouter.runtime.tracing.configuration import tracing
    from kvrouter.v1 import worker_pb2

    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
    settings = load(MockerSettings, prog="kvrouter-mocker")
    try:
        engine_config(settings, 0, 0)
        worker_config(settings, 0)
    except ValueError as error:
        refuse("kvrouter-mocker", str(error))

    async def serve(stopping: asyncio.Event) -> None:
        registry, health = new_registry(), HealthBoard()
        health.announce([service])
        async with (
            tracing(settings, registry),
            serving_ops(settings, registry, health, Tls.of(settings.tls_options())),
            AsyncExitStack() as stack,
        ):
            if settings.openai:
                await stack.enter_async_context(serving_vllm(settings, registry))
            elif settings.sglang:
                await stack.enter_async_context(serving_sglang(settings, registry))
            elif settings.workers_per_process > 1:
                await stack.enter_async_context(running_fleet(settings))
            elif settings.registration:
                worker = await stack.enter_async_context(running(settings, registry))
                await worker.registered()
            else:
                await stack.enter_async_context(serving_alone(settings, registry))
            health.set_ready(service)
            await stopping.wait()
            health.drain()

    run(serve, settings, "mocker")


if __name__ == "__main__":
    main()
