"""Compares ``kvrouter serve --engine`` with the services that need etcd and NATS, before simulated vLLM servers.

    python bench/one_process.py reuse [--requests 200] [--runs 3]
    python bench/one_process.py chats [--requests 400] [--runs 5]

``reuse`` replays a trace: against one process without a broker, and against Indexer, Scheduler, Frontend and sidecar
as separate processes. ``chats`` sends forwarded chats of 1k tokens: to one process without a broker, and to one process
with etcd and NATS, and a sidecar. It counts the processor time of all processes but the engines. Each system has
engines of its own; the runs alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.devtools.system.small_tokenizer import write_small_tokenizer
from restart import engine, processor_seconds, until, until_answered

ENGINES = 4
CLOCK = 2
"""Engine seconds in a second."""
CHAT_WORDS = 140
AT_ONCE = 8
NO_BROKER, WITH_BROKER = "without a broker", "with etcd and NATS"


@dataclass
class System:
    """A running system."""

    name: str
    url: str
    processes: list[ManagedProcess] = field(default_factory=list)
    servers: list[int] = field(default_factory=list)
    """Process ids of etcd and NATS."""

    def processor_seconds(self) -> tuple[float, float, float]:
        """Returns the processor time of the first process, of all of ours, and with etcd and NATS."""
        own = [processor_seconds(each.pid) for each in self.processes]
        return own[0], sum(own), sum(own) + sum(map(processor_seconds, self.servers))


class Bench:
    """Starts systems, and what they need."""

    def __init__(self, directory: Path, stack: AsyncExitStack, session: aiohttp.ClientSession) -> None:
        self.directory = directory
        self.stack = stack
        self.session = session
        self.tokenizer = directory / "tokenizer"
        self.tokenizer.mkdir()
        write_small_tokenizer(self.tokenizer)

    async def start(self, name: str, *arguments: str) -> ManagedProcess:
        """Starts a module."""
        command = Command(
            name,
            (sys.executable, "-m", *arguments),
            dict(os.environ) | {"XDG_RUNTIME_DIR": str(self.directory)},
        )
        process = await ManagedProcess.start(command, self.directory)
        self.stack.push_async_callback(process.stop, 20)
        return process

    async def engines(self, system: str, clock: float) -> list[str]:
        """Starts engines. Returns their URLs."""
        urls = []
        for number in range(ENGINES):
            options = ("--tokenizer", str(self.tokenizer), "--clock-factor", str(clock))
            url, process = await engine(self.directory, f"{system}-engine-{number}", *options)
            self.stack.push_async_callback(process.stop, 20)
            urls.append(url)
        for url in urls:
            await until_answered(self.session, f"{url}/health")
        return urls

    async def no_broker(self, clock: float) -> System:
        """Starts one process before engines."""
        urls = await self.engines("alone", clock)
        http, grpc = free_ports(2)
        engines = [argument for url in urls for argument in ("--engine", url)]
        process = await self.start("alone", "kvrouter.cli.main", "serve", *engines, *self._frontend(http, grpc))
        return await self._ready(System(NO_BROKER, f"http://127.0.0.1:{http}", [process]))

    async def with_broker(self, clock: float, *, split: bool) -> System:
        """Starts etcd, NATS, the services in one process or ``split``, and a sidecar before engines."""
        urls = await self.engines("fleet", clock)
        nats, etcd = NatsServer(self.directory / "nats"), EtcdServer(self.directory / "etcd")
        await asyncio.gather(nats.start(), etcd.start())
        self.stack.push_async_callback(nats.stop)
        self.stack.push_async_callback(etcd.stop)
        where = ("--etcd", etcd.endpoint, "--nats", nats.url)
        http, grpc = free_ports(2)
        engines = [argument for url in urls for argument in ("--engine", url)]
        if split:
            services = [
                await self.start("indexer", "kvrouter.indexer", *where),
                await self.start("scheduler", "kvrouter.scheduler", *where),
                await self.start("frontend", "kvrouter.frontend", *where, *self._frontend(http, grpc)),
            ]
        else:
            services = [await self.start("serve", "kvrouter.cli.main", "serve", *where, *self._frontend(http, grpc))]
        sidecar = await self.start("sidecar", "kvrouter.cli.main", "sidecar", *where, *engines)
        servers = [each.pid for each in (nats, etcd) if each.pid is not None]
        return await self._ready(System(WITH_BROKER, f"http://127.0.0.1:{http}", [*services, sidecar], servers))

    def _frontend(self, http: int, grpc: int) -> tuple[str, ...]:
        return "--port", str(http), "--bind", f"127.0.0.1:{grpc}", "--tokenizers", f"m={self.tokenizer}"

    async def _ready(self, system: System) -> System:
        async def serves_all() -> bool:
            try:
                async with self.session.get(f"{system.url}/health") as response:
                    models = (await response.json())["models"]
            except (aiohttp.ClientError, KeyError):
                return False
            return bool(models.get("m", {}).get("workers") == ENGINES)

        await until(serves_all)
        return system


async def replay(system: System, requests: int, directory: Path) -> Any:
    """Replays a trace. Returns its statistics."""
    results = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=directory))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "replay", "chat", "--target", system.url, "--model", "m"),
        *("--requests", str(requests), "--clock", str(CLOCK), "--separate-caches", "--results", str(results)),
        *("--vocabulary", "500"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    written = await asyncio.to_thread(lambda: [path.read_text(encoding="utf-8") for path in results.glob("*.json")])
    if len(written) != 1:
        raise SystemExit(output.decode())
    return json.loads(written[0])["runs"][0]


async def compare_reuse(bench: Bench, requests: int, runs: int) -> None:
    """Prints reuse and mean TTFT of each run."""
    systems = [await bench.no_broker(CLOCK), await bench.with_broker(CLOCK, split=True)]
    for run in range(runs):
        for system in systems if run % 2 == 0 else reversed(systems):
            found = await replay(system, requests, bench.directory)
            times = found["ttft_ms"]
            print(
                f"run {run}, {system.name}: reuse {found['hit_rate']:.4f} of {found['possible_hit_rate']:.4f}, TTFT "
                f"mean {times['mean']:.0f} ms, p50 {times['p50']:.0f} ms, p99 {times['p99']:.0f} ms, "
                f"{found['completed']} completed{'' if found['valid'] else ', the machine was too slow'}",
                flush=True,
            )


def chat(number: int) -> list[dict[str, str]]:
    """Returns the messages of a chat, which begins as seven others do."""
    words = [f"word{(number // 8) * 7 + each}" for each in range(CHAT_WORDS // 2)]
    words += [f"own{number * 11 + each}" for each in range(CHAT_WORDS // 2)]
    return [{"role": "user", "content": " ".join(words)}]


async def send_chats(bench: Bench, system: System, numbers: Sequence[int]) -> int:
    """Sends chats, some at once. Returns the mean of their prompt tokens."""
    tokens: list[int] = []
    waiting = iter(numbers)

    async def client() -> None:
        for number in waiting:
            body = {"model": "m", "messages": chat(number), "max_tokens": 8}
            async with bench.session.post(f"{system.url}/v1/chat/completions", json=body) as response:
                answer = await response.json()
            if response.status != 200:
                raise SystemExit(str(answer))
            tokens.append(answer["usage"]["prompt_tokens"])

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return round(statistics.fmean(tokens))


async def compare_chats(bench: Bench, requests: int, runs: int) -> None:
    """Prints the processor time of a chat."""
    systems = [await bench.no_broker(1000), await bench.with_broker(1000, split=False)]
    costs: dict[str, list[tuple[float, ...]]] = {each.name: [] for each in systems}
    for run in range(-1, runs):  # the first one warms up
        for system in systems if run % 2 == 0 else reversed(systems):
            before = system.processor_seconds()
            tokens = await send_chats(bench, system, range(run * requests, (run + 1) * requests))
            used = [
                1e6 * (after - start) / requests
                for start, after in zip(before, system.processor_seconds(), strict=True)
            ]
            if run >= 0:
                costs[system.name].append(tuple(used))
                shown = " / ".join(f"{each:.0f}" for each in used)
                print(f"run {run}, {system.name}: {shown} us a chat of {tokens} tokens", flush=True)
    for place, what in enumerate(("router", "router and sidecar", "with etcd and NATS")):
        one, other = (statistics.median(each[place] for each in costs[name]) for name in (NO_BROKER, WITH_BROKER))
        print(f"{what}: {one:.0f} us {NO_BROKER}, {other:.0f} us {WITH_BROKER}, ratio {one / other:.3f}")


async def measure(what: str, requests: int, runs: int, directory: Path) -> None:
    """Measures one comparison."""
    async with AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        bench = Bench(directory, stack, session)
        if what == "reuse":
            await compare_reuse(bench, requests or 200, runs or 3)
        else:
            await compare_chats(bench, requests or 400, runs or 5)


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("reuse", "chats"))
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--runs", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(options.what, options.requests, options.runs, Path(directory)))


if __name__ == "__main__":
    main()
