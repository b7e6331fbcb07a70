"""Mock workers in one process, as the peer runs its own. Arguments: --workers N, then options of the mocker for all."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack

from kvrouter.mocker.app import running
from kvrouter.mocker.settings import MockerSettings
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.process.lifecycle import run
from kvrouter.runtime.telemetry.metrics import new_registry


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    own, rest = parser.parse_known_args()
    settings = load(MockerSettings, rest, prog="workers")

    async def serve(stopping: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            for number in range(1, own.workers + 1):
                one = settings.model_copy(update={"worker_id": number})
                worker = await stack.enter_async_context(running(one, new_registry()))
                await worker.registered()
            await stopping.wait()

    run(serve, settings, "workers")


if __name__ == "__main__":
    main()
