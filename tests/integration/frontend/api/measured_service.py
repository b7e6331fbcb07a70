"""A service as a process of its own that tells how much memory it took, and for how long its event loop stood still.

``python measured_service.py PORT kvrouter.frontend.__main__ OPTIONS...`` runs it. Who connects to PORT gets what was
measured since the last time, as one line of JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvrouter.runtime.process import lifecycle

PROBE_SECONDS = 0.002


def reference() -> float:
    """Processor time that a fixed task takes in this process, seconds: about half a millisecond of plain Python."""
    began = time.process_time()
    sum(number * number for number in range(10_000))
    return time.process_time() - began


class Measured:
    """What the process took since it was last asked."""

    def __init__(self) -> None:
        self._longest = 0.0

    async def probe(self) -> None:
        """Notes the most that the process computed between two turns of the loop: waiting is no stall."""
        before = time.process_time()
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            now = time.process_time()
            self._longest = max(self._longest, now - before)
            before = now

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(self.take()).encode() + b"\n")
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    def take(self) -> dict[str, float]:
        # As fast as the processor is now: beside busy neighbours it takes longer for everything.
        unit = min(reference() for _ in range(5))
        taken = {"stall_units": self._longest / unit, "resident": resident("VmRSS"), "peak": resident("VmHWM")}
        Path("/proc/self/clear_refs").write_text("5")
        self._longest = 0.0
        return taken


def resident(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [each for each in lines if each.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def main(port: int, module: str) -> None:
    original = lifecycle.run

    def run(serve: Callable[[asyncio.Event], Awaitable[None]], settings: Any, component: str) -> None:
        async def measured(stopping: asyncio.Event) -> None:
            measuring = Measured()
            server = await asyncio.start_server(measuring.answer, "127.0.0.1", port)
            probing = asyncio.create_task(measuring.probe())
            try:
                await serve(stopping)
            finally:
                probing.cancel()
                server.close()

        original(measured, settings, component)

    lifecycle.run = run
    service: Any = importlib.import_module(module)
    service.main()


if __name__ == "__main__":
    measure_port, service_module, *options = sys.argv[1:]
    sys.argv = [service_module, *options]
    main(int(measure_port), service_module)
