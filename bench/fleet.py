"""Measures fleets of idle workers with real processes: CPU at rest, messages, registration, and the CPU of a request.

    python bench/fleet.py [--workers 1000,4000] [--seconds 60] [--rate 50] [--requests 0] [--per-process 1000]

For each number of workers, etcd, NATS, Indexer, Scheduler, Frontend and simulated workers start anew. Times count from
the start of the workers' processes, which take part of them, until the Frontend knows all of them, and until the
Indexer has compared all. Then the processes rest, and their CPU and messages are counted; then ``--requests``
completions of 1k tokens are sent at a steady rate. The CPU of a request is that of the services under load less that
at rest; latencies are upper bounds of buckets of the services' histograms. With several numbers of workers, a linear
fit gives what each worker adds to a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import nats
import numpy as np
import uvloop
from nats.aio.msg import Msg

sys.path.insert(0, str(Path(__file__).parent / "request"))
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import ManagedProcess
from restart import until
from systems import Servers, running_servers
from usage import cpu_ns, resident_bytes

SERVICES = ("indexer", "scheduler", "frontend")
WORKER_MODULES = tuple(
    f"kvrouter.mocker.{name}" for name in ("fleet", "settings", "standalone", "sglang.app", "vllm.app")
)
"""What simulated workers import."""
BLOCK_SIZE = 16
PROMPT = 1024
SHARED = 768
LATENCIES = {
    "selection": ("scheduler", "kvrouter_scheduler_select_seconds"),
    "arrival to dispatch": ("frontend", "kvrouter_frontend_added_seconds"),
}
"""Histograms: of the Scheduler, the Indexer's answer included, and of the Frontend until a request leaves it."""
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
    "Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
)
_POLL_SECONDS = 0.25
"""Pause between two looks at a service, each of which costs it as much as some requests."""
SETTLE_SECONDS = 15.0
"""Time after readiness for what registration has left to do."""


class Fleet:
    """A running system."""

    def __init__(self, servers: Servers, session: aiohttp.ClientSession, options: argparse.Namespace) -> None:
        self.servers = servers
        self.session = session
        self.options = options
        self.processes: dict[str, ManagedProcess] = {}
        self.ops: dict[str, str] = {}
        self.url = ""

    async def start(self, workers: int) -> tuple[float, float]:
        """Starts services, then workers. Returns the seconds until they are known, and until compared."""
        for service in SERVICES:
            rest: tuple[str, ...] = ()
            if service == "frontend":
                port = free_port()
                rest, self.url = ("--port", str(port)), f"http://127.0.0.1:{port}"
            await self._start(service, f"kvrouter.{service}", *rest)
        await until(lambda: self._is_up("frontend"))
        began = time.monotonic()
        for first in range(1, workers + 1, self.options.per_process):
            count = min(self.options.per_process, workers + 1 - first)
            settings = ("--workers-per-process", str(count), "--worker-id", str(first), "--lease-seconds", "30")
            engine = ("--model", "m", "--num-blocks", "16384", "--block-size", str(BLOCK_SIZE), "--speed", "1000")
            await self._start(f"workers-{first}", "kvrouter.mocker", *settings, *engine)
        await until(lambda: self._knows(workers))
        known = time.monotonic() - began
        await until(lambda: self._has_compared(workers))
        return known, time.monotonic() - began

    async def _start(self, name: str, module: str, *arguments: str) -> None:
        self.processes[name], self.ops[name] = await self.servers.start_service(name, module, *arguments)

    async def _is_up(self, service: str) -> bool:
        try:
            async with self.session.get(f"http://{self.ops[service]}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    async def _knows(self, workers: int) -> bool:
        await asyncio.sleep(_POLL_SECONDS)
        try:
            async with self.session.get(f"{self.url}/health") as response:
                models = (await response.json())["models"]
        except (aiohttp.ClientError, KeyError):
            return False
        return bool(models.get("m", {}).get("workers") == workers)

    async def _has_compared(self, workers: int) -> bool:
        found = await self.metrics("indexer", "kvrouter_indexer_")
        await asyncio.sleep(_POLL_SECONDS)
        ranks, unverified = (
            sum(value for name, value in found.items() if name.startswith(f"kvrouter_indexer_{kind}{{"))
            for kind in ("ranks", "unverified_ranks")
        )
        return ranks - unverified >= workers

    async def metrics(self, service: str, prefix: str) -> dict[str, float]:
        """Returns the samples of a service whose names begin with ``prefix``."""
        async with self.session.get(f"http://{self.ops[service]}/metrics") as response:
            return _samples(await response.text(), prefix)

    async def latencies(self) -> dict[str, Counter[float]]:
        """Returns the cumulative counts of the histograms in LATENCIES, by upper bound in seconds."""
        counts: dict[str, Counter[float]] = {}
        for name, (service, metric) in LATENCIES.items():
            buckets = await self.metrics(service, f"{metric}_bucket")
            counts[name] = Counter({float(key.split('le="')[1].split('"')[0]): int(n) for key, n in buckets.items()})
        return counts

    def put_workers_last(self) -> None:
        """Gives all threads of the workers the lowest priority, since real workers are on other machines."""
        for name, process in self.processes.items():
            if name not in SERVICES:
                for thread in Path(f"/proc/{process.pid}/task").iterdir():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)

    def cpu(self) -> dict[str, float]:
        """Returns the CPU seconds of each service, and of its surroundings."""
        spent = {name: cpu_ns(process.pid) / 1e9 for name, process in self.processes.items()}
        services = {name: spent.pop(name) for name in SERVICES}
        servers = {each.name: cpu_ns(each.pid or 0) / 1e9 for each in (self.servers.nats, self.servers.etcd)}
        return services | {"workers": sum(spent.values())} | servers

    def resident(self) -> str:
        """Returns the resident memory of each service, for people."""
        return _shown({name: resident_bytes(self.processes[name].pid) / 1e6 for name in SERVICES}, 0)

    async def messages(self) -> Counter[str]:
        """Returns how many messages there were so far, by kind."""
        counts: Counter[str] = Counter()
        async with self.session.get(f"http://{self.servers.etcd.endpoint}/metrics") as response:
            for name, value in _samples(await response.text(), "grpc_server_").items():
                if "_msg_received_total" in name and 'grpc_service="etcdserverpb' in name:
                    counts["etcd " + name.split('grpc_method="')[1].split('"')[0]] += int(value)
        for side in ("sent", "received"):
            found = await self.metrics("frontend", f"kvrouter_call_stream_messages_{side}_total")
            counts[f"call streams, {side} by Frontend"] += round(sum(found.values()))
        return counts


def _samples(text: str, prefix: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(prefix))
    return {name: float(value) for name, _, value in lines}


def quantile(counts: Counter[float], share: float) -> float:
    """Returns the upper bound of the bucket that holds a quantile.

    Args:
        counts: Cumulative counts, by upper bound.
        share: The quantile, from 0 to 1.
    """
    return min(bound for bound, count in counts.items() if count >= share * counts[float("inf")])


async def count_subjects(url: str, seconds: float) -> Counter[str]:
    """Counts the messages of NATS for some time, by the kind of their subject."""
    counts: Counter[str] = Counter()

    async def take(message: Msg) -> None:
        words = message.subject.split(".")
        counts["nats " + ".".join(word for word in words[:6] if word.isalpha() or word.startswith("$"))] += 1

    client = await nats.connect(url)
    await client.subscribe(">", cb=take)
    await asyncio.sleep(seconds)
    await client.close()
    return counts


async def send(url: str, requests: int, rate: float, seed: int) -> int:
    """Sends completions at a steady rate, for as little CPU as possible. Returns how many failed."""
    address, draw, ids = urlsplit(url), random.Random(seed), [str(token) for token in range(32_000)]
    shared = ",".join(draw.choices(ids, k=SHARED))
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    failed = 0

    async def one(number: int) -> None:
        nonlocal failed
        await asyncio.sleep(number / rate)
        new = ",".join(draw.choices(ids, k=PROMPT - SHARED))
        body = f'{{"model": "m", "max_tokens": 1, "prompt": [{shared},{new}]}}'
        reader, writer = idle.pop() if idle else await asyncio.open_connection(address.hostname, address.port)
        writer.write((HEAD.format(host=address.netloc, length=len(body)) + body).encode())
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r")[0]))
        idle.append((reader, writer))
        failed += not head.startswith(b"HTTP/1.1 200 ")

    await asyncio.gather(*(one(number) for number in range(requests)))
    for _, writer in idle:
        writer.close()
    return failed


async def measure(workers: int, options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Measures one fleet. Returns the CPU microseconds of a request for each service."""
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    async with running_servers(directory) as servers, aiohttp.ClientSession() as session:
        fleet = Fleet(servers, session, options)
        known, compared = await fleet.start(workers)
        spent = fleet.cpu()
        print(f"{workers} workers: known after {known:.1f} s, compared after {compared:.1f} s", flush=True)
        print(f"  CPU seconds until then: {_shown(spent, 1)}", flush=True)
        await asyncio.sleep(SETTLE_SECONDS)
        if options.count:
            before = await fleet.messages()
            counts = await count_subjects(servers.nats.url, options.count)
            counts += await fleet.messages() - before
            for kind, count in sorted(counts.items()):
                each = count / options.count / workers
                if each > 1e-4:
                    print(f"  {kind}: {each:.4f} for each worker and second")
        before_cpu, began = fleet.cpu(), time.monotonic()
        await asyncio.sleep(options.seconds)
        seconds = time.monotonic() - began
        rest = {name: (after - before_cpu[name]) / seconds for name, after in fleet.cpu().items()}
        total = sum(rest[name] for name in SERVICES)
        print(f"  at rest {total:.1%} of a core: {', '.join(f'{name} {each:.2%}' for name, each in rest.items())}")
        print(f"  resident MB: {fleet.resident()}", flush=True)
        if not options.requests:
            return {}
        fleet.put_workers_last()
        await send(fleet.url, min(200, options.requests), options.rate, 0)
        latencies, before_cpu, began = await fleet.latencies(), fleet.cpu(), time.monotonic()
        generator = time.process_time()
        failed = await send(fleet.url, options.requests, options.rate, 1)
        seconds, spent = time.monotonic() - began, fleet.cpu()
        costs = {
            name: 1e6 * (after - before_cpu[name] - rest[name] * seconds) / options.requests
            for name, after in spent.items()
        }
        costs["load generator"] = 1e6 * (time.process_time() - generator) / options.requests
        cost = {name: costs[name] for name in SERVICES}
        print(f"  µs of a request: {_shown(costs, 0)}; {options.requests / seconds:.1f}/s, {failed} failed", flush=True)
        for name, after in (await fleet.latencies()).items():
            bounds = (f"p{share} ≤ {1e3 * quantile(after - latencies[name], share / 100):.2f} ms" for share in (50, 99))
            print(f"  {name}: {', '.join(bounds)}", flush=True)
        print(f"  resident MB: {fleet.resident()}", flush=True)
        return cost


def _shown(values: dict[str, float], digits: int) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=lambda text: [int(each) for each in text.split(",")], default=[1000, 4000])
    parser.add_argument("--per-process", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=float, default=30.0, help="seconds for which messages are counted; 0 for none")
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--requests", type=int, default=0)
    options = parser.parse_args()
    costs: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        # With compiled modules, as an installed package has them; the first import writes them.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{directory}/compiled"}
        subprocess.run((sys.executable, "-c", f"import {', '.join(WORKER_MODULES)}"), check=True)
        for workers in options.workers:
            costs[workers] = uvloop.run(measure(workers, options, Path(directory) / str(workers)))
    if options.requests and len(costs) > 1:
        for names in (*((name,) for name in SERVICES), SERVICES):
            sums = [sum(cost[name] for name in names) for cost in costs.values()]
            slope, fixed = np.polyfit(list(costs), sums, 1)
            print(f"{' + '.join(names)}: {fixed:.0f} µs + {slope:.3f} µs for each worker")
    print(json.dumps({str(workers): cost for workers, cost in costs.items()}))


if __name__ == "__main__":
    main()
