"""Entry point of ``kvrouter-indexer``. Imports wait until more than its help is asked for."""

from __future__ import annotations

import asyncio

from kvrouter.runtime.config.stored_help import exit_with_help


def main() -> None:
    """Reads the options and serves until SIGTERM or SIGINT."""
    exit_with_help("indexer")
    from kvrouter.indexer.api.query_server import serving_queries
    from kvrouter.indexer.app import running
    from kvrouter.indexer.settings import IndexerSettings
    from kvrouter.runtime.config.settings import load
    from kvrouter.runtime.process import lifecycle
    from kvrouter.runtime.process.context import open_runtime
    from kvrouter.runtime.process.hosting import Hosted, host
    from kvrouter.v1.message_limits import MessageLimits

    settings = load(IndexerSettings, prog="kvrouter-indexer")

    async def serve(stopping: asyncio.Event) -> None:
        async with (
            open_runtime(settings) as runtime,
            running(settings, runtime) as service,
            serving_queries(service, runtime, settings.query_bind, max_prompt_tokens=settings.max_prompt_tokens),
        ):
            limits = MessageLimits(elements=settings.max_prompt_tokens)
            hosted = Hosted("indexer", service, lambda: service.ready, limits=limits)
            await host(runtime, [hosted], stopping)

    lifecycle.run(serve, settings, "indexer")


if __name__ == "__main__":
    main()
