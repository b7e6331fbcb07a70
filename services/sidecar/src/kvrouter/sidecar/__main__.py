"""Entry point of the sidecar: ``kvrouter sidecar`` or ``python -m kvrouter.sidecar``.

Imports wait until more than its help is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvrouter.runtime.config.stored_help import exit_with_help

PROGRAM = "kvrouter sidecar"


def main(options: Sequence[str] | None = None) -> None:
    """Reads the options, by default those of the process, and serves the engines until SIGTERM or SIGINT."""
    exit_with_help("sidecar", options)
    from kvrouter.net.tls import Tls
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.process.lifecycle import run
    from kvrouter.runtime.telemetry.health import HealthBoard
    from kvrouter.runtime.telemetry.metrics import new_registry, serving_ops
    from kvrouter.runtime.tracing.configuration import tracing
    from kvrouter.sidecar.app import running
    from kvrouter.sidecar.settings import SidecarSettings

    settings = load(SidecarSettings, options, prog=PROGRAM)

    async def sidecar(stopping: asyncio.Event) -> None:
        registry, health = new_registry(), HealthBoard()
        async with (
            tracing(settings, registry),
            serving_ops(settings, registry, health, Tls.of(settings.tls_options())),
            running(settings, registry, health),
        ):
            await stopping.wait()
            health.drain()

    run(sidecar, settings, "sidecar")


if __name__ == "__main__":
    main()
