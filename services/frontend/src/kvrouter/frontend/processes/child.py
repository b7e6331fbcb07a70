"""One of several processes of a Frontend. The parent starts it as ``python -m kvrouter.frontend.processes.child``.

The parent writes the ``Assignment`` as a line of JSON to standard input, then a line for each report it wants. The
child answers each with a line of JSON, a ``Report``, on standard output; the first one comes when it listens. It drains
when its input ends, so it does not outlive its parent.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import NoReturn

import aiohttp
import msgspec
from kvrouter.frontend import app
from kvrouter.frontend.access.quotas import LimitTable
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.net.tls import Tls
from kvrouter.runtime.process import lifecycle
from prometheus_client import CollectorRegistry, generate_latest

_METRICS_SECONDS = 5.0


class Assignment(msgspec.Struct, frozen=True):
    """Message of a parent to a child."""

    settings: str
    """The options, as JSON. The ports are those of the parent."""
    metrics_url: str
    """Where the metrics of all processes are."""
    is_restart: bool
    """Whether it replaces a process that died. Others serve meanwhile, so it listens only when it is ready."""
    limits_file: int
    """Descriptor of the shared counters of limits."""
    process: int
    """Number of the process, from 0."""
    processes: int
    """Number of processes."""


class Report(msgspec.Struct, frozen=True):
    """Message of a child to its parent."""

    ready: bool
    """Whether it can route requests."""
    metrics: str
    """Its metrics in Prometheus' text format."""


def main() -> NoReturn:
    """Runs the child until SIGTERM or the end of its input."""
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=Assignment)
    settings = FrontendSettings.model_validate_json(assignment.settings)
    limits = LimitTable(assignment.limits_file, assignment.process, assignment.processes)

    async def serve(stopping: asyncio.Event) -> None:
        def listening(registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
            def report() -> None:
                made = Report(ready(), generate_latest(registry).decode())
                sys.stdout.buffer.write(msgspec.json.encode(made) + b"\n")
                sys.stdout.buffer.flush()

            report()
            reporting.append(asyncio.create_task(_report_until_end(report, stopping)))

        reporting: list[asyncio.Task[None]] = []
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_METRICS_SECONDS)) as session:

            async def metrics() -> bytes:
                tls = Tls.of(settings.tls_options())
                context = True if tls is None else tls.client_context()
                name = None if tls is None else tls.peer_name("frontend") or None
                async with session.get(assignment.metrics_url, ssl=context, server_hostname=name) as response:
                    return await response.read()

            try:
                await app.serve(
                    settings,
                    stopping,
                    app.SharedPorts(metrics, waits_until_ready=assignment.is_restart, limits=limits),
                    started=listening,
                )
            finally:
                for task in reporting:
                    task.cancel()

    lifecycle.run(serve, settings, "frontend")


async def _report_until_end(report: Callable[[], None], stopping: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        report()
    stopping.set()


if __name__ == "__main__":
    main()
