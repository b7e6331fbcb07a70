"""A running system with a Prometheus that scrapes it and has the shipped alert rules."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer

SHIPPED = Path(__file__).parents[3] / "deploy/prometheus"
MODEL = "mock-model"
PROMPT = list(range(40))
_PATIENCE_SECONDS = 90
_CONFIGURATION = """\
global: {scrape_interval: 500ms, evaluation_interval: 500ms}
rule_files: [kvrouter.rules.yml]
scrape_configs:
  - job_name: kvrouter
    file_sd_configs: [{files: [targets.json], refresh_interval: 1s}]
    tls_config: {insecure_skip_verify: true}
"""


class Monitored:
    """Processes, and what Prometheus says of them."""

    def __init__(self, stack: AsyncExitStack, directory: Path, nats: NatsServer, etcd: EtcdServer, name: str) -> None:
        self.stack, self.directory, self.nats, self.etcd, self.namespace = stack, directory, nats, etcd, name
        self.processes: dict[str, ManagedProcess] = {}
        self.http: dict[str, int] = {}
        self._metrics: dict[str, int] = {}
        self._schemes: dict[str, str] = {}
        self._prometheus = free_port()
        self.session = aiohttp.ClientSession()
        stack.push_async_callback(self.session.close)

    async def open_prometheus(self, binaries: Path) -> None:
        """Starts Prometheus. Alerts wait for nothing: waiting times are for the sake of people, not of a test."""
        shipped = (SHIPPED / "kvrouter.rules.yml").read_text(encoding="utf-8").splitlines(keepends=True)
        rules = "".join(line for line in shipped if not line.startswith("        for:"))
        (self.directory / "kvrouter.rules.yml").write_text(rules, encoding="utf-8")
        (self.directory / "prometheus.yml").write_text(_CONFIGURATION, encoding="utf-8")
        self._list_targets()
        await self.spawn(
            "prometheus",
            str(binaries / "prometheus"),
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._prometheus}",
        )

    async def spawn(self, name: str, *command: str) -> None:
        """Starts a process, which ends with the test."""
        process = await ManagedProcess.start(Command(name, command, dict(os.environ)), self.directory)
        self.processes[name] = process

        async def end() -> None:
            process.kill()
            await process.stop(20)

        self.stack.push_async_callback(end)

    async def start(
        self,
        kind: str,
        *options: str,
        name: str = "",
        defect: str = "",
        where: bool = True,
        scheme: str = "http",
    ) -> None:
        """Starts a service that Prometheus scrapes, and returns when its metrics can be read.

        Args:
            kind: Name of its package.
            options: Its options.
            name: Name of the process; by default that of its package.
            defect: Python statements that break it before it starts.
            where: Whether it uses the NATS and the etcd of the system.
            scheme: Scheme of its metrics.
        """
        name = name or kind
        self._metrics[name], self._schemes[name] = free_port(), scheme
        options = ("--namespace", self.namespace, "--http-bind", f"127.0.0.1:{self._metrics[name]}", *options)
        if where:
            options = ("--nats", self.nats.url, "--etcd", self.etcd.endpoint, *options)
        if kind == "frontend":
            self.http[name] = free_port()
            options = (*options, "--port", str(self.http[name]))
        program = f"{defect}\nfrom kvrouter.{kind}.__main__ import main\nmain()"
        await self.spawn(name, sys.executable, "-c", program, *options)
        self._list_targets()
        await self.until(lambda: self._answers(name), f"{name} to serve metrics")

    def _list_targets(self) -> None:
        targets = [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"process": name, "__scheme__": self._schemes[name]}}
            for name, port in self._metrics.items()
        ]
        written = self.directory / "targets.json.new"
        written.write_text(json.dumps(targets), encoding="utf-8")
        shutil.move(written, self.directory / "targets.json")

    async def _answers(self, name: str) -> bool:
        try:
            url = f"{self._schemes[name]}://127.0.0.1:{self._metrics[name]}/metrics"
            async with self.session.get(url, ssl=False) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def signal(self, name: str, which: signal.Signals) -> None:
        """Sends a signal to a process."""
        os.kill(self.processes[name].pid, which)

    async def request(self, frontend: str = "frontend", *, key: str = "", **fields: Any) -> int:
        """Sends a request and returns its status; 0 if the Frontend does not listen."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self.http[frontend]}/v1/completions"
        try:
            async with self.session.post(url, json=body, headers=headers) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def until_served(self, frontend: str = "frontend") -> None:
        """Returns when a request succeeds and Prometheus has scraped every process."""

        async def served() -> bool:
            return await self.request(frontend) == 200 and len(await self.query("up == 1")) == len(self._metrics)

        await self.until(served, "a request to be served")

    async def query(self, query: str) -> list[dict[str, str]]:
        """Returns the labels of each result of a query; nothing while Prometheus starts."""
        try:
            url = f"http://127.0.0.1:{self._prometheus}/api/v1/query"
            async with self.session.get(url, params={"query": query}) as answer:
                return [each["metric"] for each in (await answer.json())["data"]["result"]]
        except aiohttp.ClientError:
            return []

    async def firing(self) -> set[str]:
        """Returns the names of the alerts that fire."""
        return {each["alertname"] for each in await self.query('ALERTS{alertstate="firing"}')}

    async def until_firing(self, *alerts: str, meanwhile: Any = None) -> None:
        """Waits until each of the alerts has fired; calls ``meanwhile`` again and again."""
        fired: set[str] = set()

        async def all_fired() -> bool:
            if meanwhile is not None:
                await meanwhile()
            fired.update(await self.firing())
            return fired.issuperset(alerts)

        try:
            await self.until(all_fired, "the alerts to fire")
        except AssertionError:
            raise AssertionError(f"expected {alerts} to fire, only these fired: {sorted(fired)}") from None

    async def until(self, condition: Any, what: str) -> None:
        """Waits until an asynchronous condition holds."""
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while not await condition():
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"waited for {what} in vain") from None
