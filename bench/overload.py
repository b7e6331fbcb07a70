"""Throughput and latency of a whole system from half to four times its capacity, and how fast it refuses the rest.

    python bench/overload.py [--loads 0.5,1,2,3,4] [--seconds 20] [--max-work 2] [--workers 2]

The capacity is measured first: completed requests per second of as many clients as fill the engines, each of which
sends its next request when the last one has ended. Then requests arrive at random times (Poisson) at multiples of that
rate, whether earlier ones have ended or not. Every prompt is a new one, so that no cache helps. Refused requests are
not repeated. The engines are simulated; their time is real.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.devtools.system.stack import StackOptions, running_stack
from rich.console import Console
from rich.table import Table

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
BLOCKS, BLOCK_SIZE = 1024, 16
"""KV cache of an engine: room for 28 requests."""
_SETTLE_SECONDS = 10.0
"""Time at the beginning of a run that is not counted: longer than an admitted request takes."""
_END_SECONDS = 120.0


@dataclass
class Run:
    """What the clients of one run observed."""

    began: float
    """Time from which it is counted."""
    seconds: float
    completed: list[float] = field(default_factory=list)
    """Durations of completed requests that arrived while it was counted, seconds."""
    refused: list[float] = field(default_factory=list)
    """Durations of refused requests, seconds."""
    completed_within: int = 0
    """Requests that completed while it was counted, whenever they arrived."""
    failed: int = 0

    @classmethod
    def of(cls, seconds: float) -> Run:
        """Returns a run that begins now and is counted for that time after it has settled."""
        return cls(time.perf_counter() + _SETTLE_SECONDS, seconds)

    @property
    def until(self) -> float:
        """Time until which it is counted."""
        return self.began + self.seconds

    def add(self, status: int, began: float, ended: float) -> None:
        """Adds the outcome of a request."""
        if status == 200:
            self.completed_within += self.began <= ended <= self.until
        if not self.began <= began <= self.until:
            return
        if status == 200:
            self.completed.append(ended - began)
        elif status in (429, 503):
            self.refused.append(ended - began)
        else:
            self.failed += 1


class Client:
    """Sends requests to a Frontend."""

    def __init__(self, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._model = model
        self._numbers = itertools.count(1)
        self._random = random.Random(7)

    async def send(self, run: Run) -> bool:
        """Sends one request and adds its outcome to the run. Returns whether it completed."""
        prompt = [next(self._numbers), *(self._random.randrange(1000) for _ in range(PROMPT_TOKENS - 1))]
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        began = time.perf_counter()
        try:
            async with self._http.post("/v1/completions", json=body) as response:
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        run.add(status, began, time.perf_counter())
        return status == 200

    async def closed_loop(self, clients: int, seconds: float) -> Run:
        """Runs so many clients that each send one request after the other."""
        run = Run.of(seconds)

        async def repeat() -> None:
            while time.perf_counter() < run.until:
                if not await self.send(run):
                    await asyncio.sleep(0.1)

        await asyncio.gather(*(repeat() for _ in range(clients)))
        return run

    async def open_loop(self, per_second: float, seconds: float) -> Run:
        """Sends requests at random times."""
        run, due = Run.of(seconds), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while due < run.until:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self.send(run))
                due += self._random.expovariate(per_second)
        return run


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns a percentile; None without values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def milliseconds(seconds: float | None) -> str:
    """Returns a time for the table."""
    return "-" if seconds is None else f"{seconds * 1000:,.1f}" if seconds < 0.1 else f"{seconds * 1000:,.0f}"


def row(load: float, offered: float, run: Run) -> Iterator[str]:
    """Yields the cells of a run."""
    total = len(run.completed) + len(run.refused) + run.failed
    yield f"{load:g}"
    yield f"{offered:.1f}"
    yield f"{run.completed_within / run.seconds:.1f}"
    yield f"{len(run.refused) / max(1, total):.0%}"
    yield milliseconds(percentile(run.completed, 0.5))
    yield milliseconds(percentile(run.completed, 0.99))
    yield milliseconds(percentile(run.refused, 0.5))
    yield milliseconds(percentile(run.refused, 0.99))
    yield str(run.failed)


async def measure(loads: Sequence[float], seconds: float, max_work: float, workers: int) -> None:
    """Prints the table."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvrouter-") as directory:
        options = StackOptions(
            Path(directory),
            Path(directory),
            workers=workers,
            blocks=BLOCKS,
            block_size=BLOCK_SIZE,
            frontend_options=("--max-work", str(max_work)),
        )
        timeout = aiohttp.ClientTimeout(total=_END_SECONDS)
        async with (
            running_stack(options, lambda words: console.print(f"{words} ...")) as stack,
            aiohttp.ClientSession(
                f"http://{stack.http}", connector=aiohttp.TCPConnector(limit=0), timeout=timeout
            ) as http,
        ):
            client = Client(http, options.model)
            fill = 2 * workers * BLOCKS * BLOCK_SIZE // (PROMPT_TOKENS + OUTPUT_TOKENS)
            found = await client.closed_loop(fill, seconds)
            capacity = found.completed_within / found.seconds
            console.print(f"capacity: {capacity:.1f} requests/s of {fill} clients")
            table = Table(
                *("load", "offered/s", "completed/s", "refused", "p50 ms", "p99 ms"),
                *("refusal p50 ms", "refusal p99 ms", "failed"),
            )
            for load in loads:
                run = await client.open_loop(load * capacity, seconds)
                table.add_row(*row(load, load * capacity, run))
            console.print(table)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.5,0.8,1,1.5,2,3,4")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-work", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    loads = [float(each) for each in given.loads.split(",")]
    asyncio.run(measure(loads, given.seconds, given.max_work, given.workers))


if __name__ == "__main__":
    main()
