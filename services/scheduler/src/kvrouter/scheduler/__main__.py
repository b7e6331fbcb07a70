"""Entry point of ``kvrouter-scheduler``. Imports wait until more than its help is asked for."""

from __future__ import annotations

import asyncio

from kvrouter.runtime.config.stored_help import exit_with_help


def main() -> None:
    """Reads the options, serves until SIGTERM or SIGINT, and exits."""
    exit_with_help("scheduler")
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.process import lifecycle
    from kvrouter.runtime.process.context import open_runtime
    from kvrouter.runtime.process.hosting import Hosted, host
    from kvrouter.scheduler.app import running
    from kvrouter.scheduler.settings import SchedulerSettings
    from kvrouter.v1.message_limits import MessageLimits

    settings = load(SchedulerSettings, prog="kvrouter-scheduler")

    async def serve(stopping: asyncio.Event) -> None:
        async with open_runtime(settings) as runtime, running(settings, runtime) as service:
            limits = MessageLimits(elements=settings.max_prompt_tokens)
            hosted = Hosted("scheduler", service, lambda: service.ready, limits=limits)
            await host(runtime, [hosted], stopping)

    lifecycle.run(serve, settings, "scheduler")


if __name__ == "__main__":
    main()
