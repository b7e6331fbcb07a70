"""Measures a restart of ``kvrouter serve --engine --state`` with real processes, beside simulated vLLM servers.

    python bench/restart.py [--blocks 1000000] [--engines 2] [--runs 3]

The engines fill their caches with prompts of 2,000 blocks. The router is killed (SIGKILL) after its snapshot, the
engines serve a few prompts more, and the router starts again. Time counts from the start of the process until
``/ready`` says 200; beside it stands the time of a start before empty engines. Then prompts are sent that an engine
holds, each once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess

BLOCK = 16
PROMPT_BLOCKS = 2_000
MISSED = 4
SAMPLED = 40
FAST = ("--clock-factor", "1000")
"""Options of an engine that takes next to no time."""


def prompt(number: int) -> list[int]:
    """Returns the tokens of a prompt."""
    draw = random.Random(number)
    return [draw.randrange(32_000) for _ in range(PROMPT_BLOCKS * BLOCK + 1)]


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Returns whether a URL answers with 200."""
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def until(condition: Callable[[], Awaitable[bool]]) -> float:
    """Waits until a condition holds. Returns the seconds that it took."""
    began = time.monotonic()
    while not await condition():  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def until_answered(session: aiohttp.ClientSession, url: str) -> float:
    """Waits until a URL answers with 200. Returns the seconds that it took."""
    return await until(lambda: answers(session, url))


def processor_seconds(pid: int) -> float:
    """Returns the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def complete(session: aiohttp.ClientSession, base: str, number: int) -> int:
    """Sends a prompt. Returns the overlap that the router knew; -1 for none said."""
    body = {"model": "m", "prompt": prompt(number), "max_tokens": 1}
    async with session.post(f"{base}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(await response.text())
        return int(response.headers.get("x-kvrouter-overlap-blocks", -1))


async def engine(directory: Path, name: str, *options: str) -> tuple[str, ManagedProcess]:
    """Starts a simulated vLLM server, with further options. Returns its URL."""
    port, live, replay = free_ports(3)
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{live}", "replay_endpoint": f"tcp://*:{replay}"}
    command = (
        *(sys.executable, "-m", "kvrouter.mocker", "--openai", "--bind", f"127.0.0.1:{port}", "--model", "m"),
        *("--block-size", str(BLOCK), "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
        *options,
    )
    process = await ManagedProcess.start(Command(name, command, dict(os.environ)), directory)
    return f"http://127.0.0.1:{port}", process


class Router:
    """The process under test."""

    def __init__(self, directory: Path, urls: list[str]) -> None:
        self.directory = directory
        self.urls = urls
        self.starts = 0
        self.http = self.ops = ""
        self.process: ManagedProcess | None = None

    async def start(self, session: aiohttp.ClientSession, *options: str) -> tuple[float, float]:
        """Starts it. Returns the seconds until it is ready, and its processor time until then."""
        http, grpc, ops = (f"127.0.0.1:{port}" for port in free_ports(3))
        self.http, self.ops = f"http://{http}", f"http://{ops}"
        engines = [argument for url in self.urls for argument in ("--engine", url)]
        arguments = (*engines, "--port", http.rpartition(":")[2], "--bind", grpc, "--http-bind", ops, *options)
        self.starts += 1
        command = (sys.executable, "-m", "kvrouter.cli.main", "serve", *arguments)
        # With compiled modules, as an installed package has them; the first start writes them.
        compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.directory / "compiled")}
        environment = dict(os.environ) | compiled | {"XDG_RUNTIME_DIR": str(self.directory)}
        self.process = await ManagedProcess.start(Command(f"serve-{self.starts}", command, environment), self.directory)
        seconds = await until_answered(session, f"{self.ops}/ready")
        return seconds, processor_seconds(self.process.pid)

    async def kill(self) -> None:
        """Kills it."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            await self.process.stop(20)
            self.process = None

    async def metric(self, session: aiohttp.ClientSession, name: str) -> list[float]:
        """Returns the values of a metric."""
        async with session.get(f"{self.ops}/metrics") as response:
            lines = (await response.text()).splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]


async def measure(blocks: int, engines: int, runs: int, directory: Path) -> None:
    """Prints the results."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        urls = []
        for number in range(engines):
            room = ("--num-blocks", str(blocks // engines + 8 * PROMPT_BLOCKS))
            url, process = await engine(directory, f"engine-{number}", *room, *FAST)
            stack.push_async_callback(process.stop, 20)
            urls.append(url)
        for url in urls:
            await until_answered(session, f"{url}/health")
        router = Router(directory, urls)
        stack.push_async_callback(router.kill)
        for _ in range(runs):
            seconds, processor = await router.start(session)
            print(f"empty: ready after {seconds:.2f} s, {processor:.2f} s of processor time", flush=True)
            await router.kill()
        state = ("--state", str(directory / "state"), "--state-seconds", "1")
        await router.start(session, *state)
        prompts = blocks // PROMPT_BLOCKS
        for number in range(prompts):
            await complete(session, urls[number % engines], number)
        filled = 0.0

        async def indexed() -> bool:
            return sum(await router.metric(session, "kvrouter_relay_blocks")) >= prompts * PROMPT_BLOCKS

        async def saved() -> bool:
            ages = await router.metric(session, "kvrouter_relay_state_age_seconds")
            return max(ages) < time.monotonic() - filled - 5

        await until(indexed)
        filled = time.monotonic()
        await until(saved)
        for run in range(runs):
            await router.kill()
            missed = range(prompts + MISSED * run, prompts + MISSED * (run + 1))
            for number in missed:
                await complete(session, urls[number % engines], number)
            seconds, processor = await router.start(session, *state)
            restored = sum(await router.metric(session, "kvrouter_relay_restored_blocks"))
            sampled = [*random.Random(run).sample(range(prompts), min(prompts, SAMPLED)), *missed]
            overlaps = [await complete(session, router.http, number) for number in sampled]
            blind = sum(overlap < PROMPT_BLOCKS for overlap in overlaps)
            print(
                f"run {run}: ready after {seconds:.2f} s, {processor:.2f} s of processor time, "
                f"{restored:.0f} blocks restored, "
                f"{blind} of {len(sampled)} decisions without the overlap",
                flush=True,
            )
            await asyncio.sleep(3)


def main() -> None:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(options.blocks, options.engines, options.runs, Path(directory)))


if __name__ == "__main__":
    main()
