"""Throughput and latency of a whole system from half to four times its capacity, and how fast it refuses the rest.

    python bench/overload.py [--loads 0.5,1,2,3,4] [--seconds 20] [--max-work 2] [--workers 2]
    python bench/overload.py --tenants [--seconds 20] [--workers 2] [--flood 80]

The capacity is measured first: completed requests per second of as many clients as fill the engines, each of which
sends its next request when the last one has ended. Then requests arrive at random times (Poisson) at multiples of that
rate, whether earlier ones have ended or not. Every prompt is a new one, so that no cache helps. Refused requests are
not repeated. The engines are simulated; their time is real.

With ``--tenants``, a quiet tenant of FLOODS fewer clients is measured alone, and then beside a tenant that floods the
system with as many requests as its clients can have in flight. This is done with engines that are short of slots, and
with engines that are short of KV cache.
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
from kvrouter.frontend.access.key_file import KeyEntry, KeyFile, TenantEntry, new_key, write_key_file
from rich.console import Console
from rich.table import Table

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64
BLOCKS, BLOCK_SIZE = 1024, 16
"""KV cache of an engine: room for 28 requests."""
FLOODS = 20
"""Clients of the tenant that floods the system, for each client of the quiet one."""
SHORT_OF = {"slots": {"sequences": 8}, "KV cache": {"blocks": 8 * (PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE}}
"""What the engines of ``--tenants`` have room for: eight requests each."""
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
    first_tokens: list[float] = field(default_factory=list)
    """Times to their first tokens, seconds; only of streamed ones."""
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

    def add(self, status: int, began: float, ended: float, first: float | None = None) -> None:
        """Adds the outcome of a request."""
        if status == 200:
            self.completed_within += self.began <= ended <= self.until
        if not self.began <= began <= self.until:
            return
        if status == 200:
            self.completed.append(ended - began)
            if first is not None:
                self.first_tokens.append(first - began)
        elif status in (429, 503):
            self.refused.append(ended - began)
        else:
            self.failed += 1


class Client:
    """Sends requests to a Frontend."""

    def __init__(self, http: aiohttp.ClientSession, model: str, key: str = "", seed: int = 7) -> None:
        """Requests with a ``key`` are streamed."""
        self._http = http
        self._model = model
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._numbers = itertools.count(1)
        self._random = random.Random(seed)

    async def send(self, run: Run) -> bool:
        """Sends one request and adds its outcome to the run. Returns whether it completed."""
        prompt = [next(self._numbers), *(self._random.randrange(1000) for _ in range(PROMPT_TOKENS - 1))]
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS}
        body["ignore_eos"] = True
        first: float | None = None
        began = time.perf_counter()
        try:
            async with self._http.post(
                "/v1/completions", json=body | {"stream": bool(self._headers)}, headers=self._headers
            ) as response:
                if self._headers:
                    await response.content.readany()
                    first = time.perf_counter()
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            status = 0
        run.add(status, began, time.perf_counter(), first)
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


def keys_of(tenants: Sequence[str], path: Path) -> dict[str, str]:
    """Writes a file of API keys. Returns the key of each tenant."""
    keys = {tenant: new_key(tenant) for tenant in tenants}
    entries = [KeyEntry(id=tenant, hash=digest, tenant=tenant) for tenant, (_, digest) in keys.items()]
    write_key_file(path, KeyFile(keys=entries, tenants=[TenantEntry(name=tenant) for tenant in tenants]))
    return {tenant: key for tenant, (key, _) in keys.items()}


async def measure_tenants(seconds: float, workers: int, flood: int) -> None:
    """Prints the times to first token of a quiet tenant, alone and beside a flood."""
    console = Console()
    table = Table(
        *("short of", "requests of", "clients", "completed/s", "first token p50 ms", "p99 ms"),
        *("p50 / alone", "p99 / alone", "failed"),
    )
    for bottleneck, engine in SHORT_OF.items():
        with tempfile.TemporaryDirectory(prefix="kvrouter-") as directory:
            keys = keys_of(("quiet", "flood"), Path(directory) / "keys.json")
            options = StackOptions(
                Path(directory),
                Path(directory),
                workers=workers,
                block_size=BLOCK_SIZE,
                frontend_options=("--api-keys", str(Path(directory) / "keys.json")),
                api_key=keys["quiet"],
                **engine,
            )
            async with (
                running_stack(options, lambda words: console.print(f"{words} ...")) as stack,
                aiohttp.ClientSession(
                    f"http://{stack.http}",
                    connector=aiohttp.TCPConnector(limit=0),
                    timeout=aiohttp.ClientTimeout(total=_END_SECONDS),
                ) as http,
            ):
                quiet = Client(http, options.model, keys["quiet"])
                other = Client(http, options.model, keys["flood"], seed=8)
                few = max(1, flood // FLOODS)
                alone = await quiet.closed_loop(few, seconds)
                flooding = asyncio.create_task(other.closed_loop(flood, seconds))
                beside = await quiet.closed_loop(few, seconds)
                for name, clients, run in (
                    ("the quiet tenant, alone", few, alone),
                    ("the same beside the flood", few, beside),
                    ("the flood", flood, await flooding),
                ):
                    table.add_row(bottleneck, name, str(clients), *cells(run, alone))
    console.print(table)


def cells(run: Run, alone: Run) -> Iterator[str]:
    """Yields the cells of a tenant's run, compared with the quiet tenant's alone."""
    times = [(percentile(run.first_tokens, share), percentile(alone.first_tokens, share)) for share in (0.5, 0.99)]
    yield f"{run.completed_within / run.seconds:.1f}"
    yield from (milliseconds(each) for each, _ in times)
    yield from ("-" if each is None or not base else f"{each / base:.2f}" for each, base in times)
    yield str(run.failed + len(run.refused))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", default="0.5,0.8,1,1.5,2,3,4")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--max-work", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tenants", action="store_true")
    parser.add_argument("--flood", type=int, default=80)
    given = parser.parse_args()
    if given.tenants:
        asyncio.run(measure_tenants(given.seconds, given.workers, given.flood))
        return
    loads = [float(each) for each in given.loads.split(",")]
    asyncio.run(measure(loads, given.seconds, given.max_work, given.workers))


if __name__ == "__main__":
    main()
