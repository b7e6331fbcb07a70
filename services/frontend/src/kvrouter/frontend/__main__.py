"""Entry point of ``kvrouter-frontend``, the gateway as a process of its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kvrouter.frontend.app import request_limits, running, serving_http
from kvrouter.frontend.scheduler_client.rendezvous import RemoteSchedulers
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.runtime.config.settings import load
from kvrouter.runtime.config.sources import refuse
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.process.lifecycle import run
from kvrouter.v1 import frontend_pb2

_DESCRIPTOR = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]


def main() -> None:
    """Runs the Frontend until SIGTERM."""
    settings = load(FrontendSettings, prog="kvrouter-frontend")
    if settings.lacks_scheduler():
        refuse("kvrouter-frontend", "--static-workers: name the Schedulers with --static-schedulers")

    async def serve(stopping: asyncio.Event) -> None:
        async with (
            open_runtime(settings) as runtime,
            aclosing(RemoteSchedulers(runtime.directory)) as schedulers,
            running(settings, runtime, schedulers) as service,
            serving_http(service, settings, runtime) as http_address,
        ):
            limits = request_limits(settings)
            hosted = Hosted("frontend", _DESCRIPTOR, service, service.ready, http_address, limits)
            await host(runtime, [hosted], stopping)

    run(serve, settings, "frontend")


if __name__ == "__main__":
    main()
