"""Measures when a Frontend replaces the deciding Scheduler, beside processes that burn CPU.

    python bench/replicas/decider.py [--seconds 300] [--stops 3] [--burners 2] [--rate 20] [-- FRONTEND OPTIONS]

First the deciding Scheduler is stopped for 300 ms of every second: nothing should replace it. Then it is stopped for
5 s, several times: another Scheduler should take over in less than a second, and the stopped one should not be used
when it continues, as long as the Frontend avoids it. Requests of 1k tokens come at a steady rate meanwhile. None may
fail, decisions without overlaps are counted, and no Scheduler may keep a booking. Overload advises no sharding here,
which moves sessions, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "request")]
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import ManagedProcess
from restart import answers, until, until_answered
from systems import Servers, running_servers

SCHEDULERS = ("scheduler-0", "scheduler-1")
SHORT_SECONDS, LONG_SECONDS = 0.3, 5.0
AVOIDED_SECONDS = 15.0
"""Time for which a Frontend avoids a Scheduler that did not answer."""


@dataclass
class Request:
    began: float
    waited: float = 0.0
    ok: bool = False


@dataclass
class System:
    servers: Servers
    session: aiohttp.ClientSession
    options: argparse.Namespace
    processes: dict[str, ManagedProcess] = field(default_factory=dict)
    ops: dict[str, str] = field(default_factory=dict)
    url: str = ""
    requests: list[Request] = field(default_factory=list)

    async def start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        await self._start("indexer", "kvrouter.indexer")
        for name in SCHEDULERS:
            await self._start(name, "kvrouter.scheduler", "--instance-id", name, "--overload-lag-ms", "0")
        engines = ("--model", "m", "--workers-per-process", "4", "--worker-id", "1", "--num-blocks", "16384")
        await self._start("workers", "kvrouter.mocker", *engines, "--block-size", "16", "--speed", "100")
        await self._start("frontend", "kvrouter.frontend", "--port", str(port), *self.options.frontend)
        for name in ("frontend", *SCHEDULERS):
            await until_answered(self.session, f"http://{self.ops[name]}/health")
        await until(self._serves)
        for _ in range(self.options.burners):
            burner = (sys.executable, "-c", "while True: pass")
            await self.servers.start("burner", burner, os.environ)

    async def _start(self, name: str, module: str, *arguments: str) -> None:
        json_logs = ("--log-format", "json")
        self.processes[name], self.ops[name] = await self.servers.start_service(name, module, *json_logs, *arguments)

    async def _serves(self) -> bool:
        return await answers(self.session, f"{self.url}/health") and bool(self.sessions())

    def sessions(self) -> list[str]:
        """Returns which Schedulers the Frontend had a session with, in order."""
        lines = self.processes["frontend"].log_file.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.startswith("{") and '"session.opened"' in line]
        return [entry["scheduler"] for entry in entries]

    def signal(self, name: str, which: signal.Signals) -> None:
        os.kill(self.processes[name].pid, which)

    async def metric(self, name: str) -> float:
        """Returns the sum of a metric over all Schedulers."""
        total = 0.0
        for scheduler in SCHEDULERS:
            async with self.session.get(f"http://{self.ops[scheduler]}/metrics") as response:
                lines = (await response.text()).splitlines()
            total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
        return total

    async def has_no_bookings(self) -> bool:
        return not await self.metric("kvrouter_scheduler_bookings ")

    async def load(self) -> None:
        """Sends requests until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                group.create_task(self._complete(number))
                await asyncio.sleep(1 / self.options.rate)

    async def _complete(self, number: int) -> None:
        prompt = [number % 8] * 512 + [number % 32_000 + place for place in range(512)]
        request = Request(time.monotonic())
        self.requests.append(request)
        body = {"model": "m", "prompt": prompt, "max_tokens": 1}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            await response.read()
            request.ok = response.status == 200
        request.waited = time.monotonic() - request.began


async def measure(options: argparse.Namespace, directory: Path) -> None:
    async with running_servers(directory) as servers, aiohttp.ClientSession() as session:
        system = System(servers, session, options)
        await system.start()
        loading = asyncio.create_task(system.load())
        await asyncio.sleep(2)
        decider, replaced = system.sessions()[-1], len(system.sessions())
        ends = time.monotonic() + options.seconds
        while time.monotonic() < ends:
            system.signal(decider, signal.SIGSTOP)
            await asyncio.sleep(SHORT_SECONDS)
            system.signal(decider, signal.SIGCONT)
            await asyncio.sleep(1 - SHORT_SECONDS)
        replaced = len(system.sessions()) - replaced
        waits = [request.waited for request in system.requests]
        print(
            f"stopped for 0.3 s of every second: {replaced} replacements, longest wait {max(waits):.2f} s", flush=True
        )
        for _ in range(options.stops):
            decider, sessions = system.sessions()[-1], len(system.sessions())
            first, began = len(system.requests), time.monotonic()
            system.signal(decider, signal.SIGSTOP)
            await until(lambda before=sessions: _is_longer(system, before))
            took = time.monotonic() - began
            await asyncio.sleep(max(0.0, began + LONG_SECONDS - time.monotonic()))
            system.signal(decider, signal.SIGCONT)
            await asyncio.sleep(max(0.0, began + AVOIDED_SECONDS - time.monotonic()))
            returns = system.sessions()[sessions + 1 :].count(decider)
            await asyncio.sleep(LONG_SECONDS)
            longest = max(request.waited for request in system.requests[first:])
            print(
                f"stopped for 5 s: replaced after {took:.2f} s, longest wait {longest:.2f} s, "
                f"used again {returns} times while it is avoided",
                flush=True,
            )
        loading.cancel()
        await asyncio.wait({loading})
        await until(system.has_no_bookings)
        failed = sum(not request.ok for request in system.requests if request.waited)
        load_only = await system.metric("kvrouter_scheduler_load_only_total")
        print(f"{len(system.requests)} requests, {failed} failed, {load_only:.0f} decisions without overlaps")


async def _is_longer(system: System, before: int) -> bool:
    await asyncio.sleep(0.01)
    return len(system.sessions()) > before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--burners", type=int, default=2)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("frontend", nargs="*", help="options of the Frontend")
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(measure(parser.parse_args(), Path(directory)))


if __name__ == "__main__":
    main()
