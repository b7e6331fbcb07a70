"""The shipped alert rules in a real Prometheus that scrapes a running system, whose parts are then broken."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port, free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import connect
from kvrouter.v1.names import service_key

pytestmark = pytest.mark.timeout(290)

SHIPPED = Path(__file__).parents[3] / "deploy/prometheus"
MODEL = "mock-model"
KINDS = ("indexer", "scheduler", "frontend")
_CONFIGURATION = """\
global: {scrape_interval: 500ms, evaluation_interval: 500ms}
rule_files: [kvrouter.rules.yml]
scrape_configs:
"""


def test_promtool_accepts_the_rules_and_provokes_each_alert(prometheus_bin: Path) -> None:
    for command in (
        ["check", "rules", "kvrouter.rules.yml"],
        ["test", "rules", "kvrouter.test.yml"],
        ["check", "config", "prometheus.yml"],
    ):
        done = subprocess.run(
            [str(prometheus_bin / "promtool"), *command], cwd=SHIPPED, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


class System:
    """Running services with a Prometheus that scrapes them."""

    def __init__(self, stack: AsyncExitStack, directory: Path, nats: NatsServer, etcd: EtcdServer) -> None:
        self.stack, self.directory, self.nats, self.etcd = stack, directory, nats, etcd
        self.processes: dict[str, ManagedProcess] = {}
        self.ports = dict(zip((*KINDS, "mocker", "http", "prometheus"), free_ports(6), strict=True))
        self.session = aiohttp.ClientSession()

    async def start(self, name: str, *command: str) -> None:
        process = await ManagedProcess.start(Command(name, command, dict(os.environ)), self.directory)
        self.processes[name] = process

        async def end() -> None:
            process.kill()
            await process.stop(20)

        self.stack.push_async_callback(end)

    async def request(self) -> int:
        """Sends a request and returns its status; 0 if the Frontend does not listen."""
        body = {"model": MODEL, "prompt": list(range(40)), "max_tokens": 1}
        try:
            async with self.session.post(f"http://127.0.0.1:{self.ports['http']}/v1/completions", json=body) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def query(self, query: str) -> list[dict[str, str]]:
        """Returns the labels of each result of a query; nothing while Prometheus starts."""
        try:
            url = f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/query"
            async with self.session.get(url, params={"query": query}) as answer:
                return [each["metric"] for each in (await answer.json())["data"]["result"]]
        except aiohttp.ClientError:
            return []

    async def firing(self) -> set[str]:
        return {each["alertname"] for each in await self.query('ALERTS{alertstate="firing"}')}

    async def until_firing(self, *alerts: str, requests: bool = False) -> None:
        """Waits until all of the alerts fire; meanwhile sends requests, if asked to."""
        seen: set[str] = set()
        try:
            async with asyncio.timeout(60):
                while not seen.issuperset(alerts):
                    if requests:
                        await self.request()
                    await asyncio.sleep(0.2)
                    seen |= await self.firing()
        except TimeoutError:
            raise AssertionError(f"expected {alerts} to fire, only these fired: {sorted(seen)}") from None


@pytest.fixture
async def system(
    tmp_path: Path, own_nats: NatsServer, own_etcd: EtcdServer, namespace: str, prometheus_bin: Path
) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        started = System(stack, tmp_path, own_nats, own_etcd)
        stack.push_async_callback(started.session.close)
        where = ("--namespace", namespace, "--nats", own_nats.url, "--etcd", own_etcd.endpoint)
        own = {
            "indexer": (),
            "scheduler": ("--router-mode", "kv"),
            "frontend": (
                *("--port", str(started.ports["http"]), "--request-timeout-seconds", "1"),
                *("--record", str(tmp_path / "traffic.jsonl"), "--record-max-bytes", "4096"),
                *("--otlp-endpoint", f"http://127.0.0.1:{free_port()}"),
            ),
            "mocker": ("--clock-factor", "50"),
        }
        for name, options in own.items():
            ops = ("--http-bind", f"127.0.0.1:{started.ports[name]}")
            await started.start(name, sys.executable, "-m", f"kvrouter.{name}", *where, *ops, *options)
        shutil.copy(SHIPPED / "kvrouter.rules.yml", tmp_path)
        # Waiting times are for the sake of people, not of this test.
        rules = tmp_path / "kvrouter.rules.yml"
        lines = rules.read_text(encoding="utf-8").splitlines(keepends=True)
        rules.write_text("".join(line for line in lines if not line.startswith("        for:")), encoding="utf-8")
        jobs = "".join(
            f'  - {{job_name: kvrouter-{kind}, static_configs: [{{targets: ["127.0.0.1:{started.ports[kind]}"]}}]}}\n'
            for kind in KINDS
        )
        (tmp_path / "prometheus.yml").write_text(_CONFIGURATION + jobs, encoding="utf-8")
        await started.start(
            "prometheus",
            str(prometheus_bin / "prometheus"),
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{started.ports['prometheus']}",
        )
        yield started


async def test_faults_of_a_running_system_raise_their_alerts(system: System, namespace: str) -> None:
    async with asyncio.timeout(60):
        while await system.request() != 200 or len(await system.query("up == 1")) < len(KINDS):
            await asyncio.sleep(0.1)
    # There is no collector, and a recording of 4 KiB is soon full.
    await system.until_firing("KvrouterTracesLost", "KvrouterBoundNearlyFull", requests=True)

    async with connect(system.etcd.endpoint) as etcd:
        await etcd.put(service_key(namespace, "frontend", "garbage").encode(), b"\xff\xff\xff")
    await system.until_firing("KvrouterUndecodableEntries")

    system.processes["indexer"].kill()
    await system.until_firing("KvrouterProcessDown", "KvrouterRoutedOnLoadAlone", requests=True)

    os.kill(system.processes["mocker"].pid, signal.SIGSTOP)
    await system.until_firing("KvrouterWorkersUnhealthy", "KvrouterRequestsFail", requests=True)

    quiet = {"KvrouterNatsDisconnected", "KvrouterRegistrationsOutdated", "KvrouterListedWorkersMissing"}
    assert not quiet & await system.firing()
    await system.nats.kill()
    await system.until_firing("KvrouterNatsDisconnected")
    await system.etcd.kill()
    await system.until_firing("KvrouterRegistrationsOutdated")
