"""Entry point of the Indexer process: ``python -m kvrouter.indexer``."""

from __future__ import annotations

import asyncio

from kvrouter.indexer.app import running
from kvrouter.indexer.settings import IndexerSettings
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.process import lifecycle
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.message_limits import MessageLimits

DESCRIPTOR = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]


def main() -> None:
    """Reads the options and serves until SIGTERM or SIGINT."""
    settings = load(IndexerSettings)

    async def serve(stopping: asyncio.Event) -> None:
        async with open_runtime(settings) as runtime, running(settings, runtime) as service:
            limits = MessageLimits(elements=settings.max_prompt_tokens)
            hosted = Hosted("indexer", DESCRIPTOR, service, lambda: service.ready, limits=limits)
            await host(runtime, [hosted], stopping)

    lifecycle.run(serve, settings, "indexer")


if __name__ == "__main__":
    main()
