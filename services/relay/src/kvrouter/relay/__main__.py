"""Entry point of the relay: ``kvrouter relay`` or ``python -m kvrouter.relay``.

Imports wait until more than its help is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrouter.runtime.config.stored_help import exit_with_help

PROGRAM = "kvrouter relay"
_READY = "relay"


def main(options: Sequence[str] | None = None) -> None:
    """Reads the options, by default those of the process, and relays until SIGTERM or SIGINT."""
    exit_with_help("relay", options)
    from kvrouter.net.tls import Tls
    from kvrouter.publisher.errors import InvalidConfig
    from kvrouter.relay.app import running, worker_config
    from kvrouter.relay.settings import RelaySettings
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.config.sources import refuse
    from kvrouter.runtime.process.lifecycle import run
    from kvrouter.runtime.telemetry.health import HealthBoard
    from kvrouter.runtime.telemetry.metrics import new_registry, serving_ops

    settings = load(RelaySettings, options, prog=PROGRAM)
    try:
        worker_config(settings, settings.worker_id or 0)
    except InvalidConfig as error:
        refuse(PROGRAM, str(error))
    if settings.state and settings.worker_id is None:
        refuse(PROGRAM, "--state: name the worker with --worker-id, so that its state is found again")

    async def relay(stopping: asyncio.Event) -> None:
        ready = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(ready, stopping))
            await stopping.wait()
            if not ready.is_set():
                serving.cancel()  # it may wait for the engine or for etcd

    async def serve(ready: asyncio.Event, stopping: asyncio.Event) -> None:
        registry, health = new_registry(), HealthBoard()
        health.announce([_READY])
        async with (
            serving_ops(settings, registry, health, Tls.of(settings.tls_options())),
            running(settings, registry) as worker,
        ):
            ready.set()
            await worker.registered()
            health.set_ready(_READY)
            await stopping.wait()
            health.drain()

    run(relay, settings, "relay")


if __name__ == "__main__":
    main()
