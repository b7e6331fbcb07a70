"""Runs the commands, health checks and environments of the secured compose sample as processes, and sends a request.

Without a container engine: only addresses and paths of the containers are replaced.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kvrouter.cli.main import app
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.stack import service_environment
from kvrouter.net.tls import Tls, TlsOptions
from typer.testing import CliRunner

pytestmark = pytest.mark.timeout(240)

DEPLOY = Path(__file__).parents[3] / "deploy"
BIN = Path(sys.executable).parent
MODULES = {"indexer": "indexer", "scheduler": "scheduler", "frontend": "frontend", "worker-1": "mocker"}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - replaced by loopback


class Sample:
    """The sample with the files of each container in a folder, and free ports instead of the containers' own ones."""

    def __init__(self, folder: Path, certificates: Path) -> None:
        self.folder = folder
        self.certificates = certificates
        self.plain = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
        self.secure = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())
        nats, monitor, etcd, self.etcd_peer, *ports = free_ports(4 + 3 * len(MODULES))
        self.servers = {
            **{f"{host}:4222": f"127.0.0.1:{nats}" for host in ("nats", EVERYWHERE)},
            **{f"{host}:2379": f"127.0.0.1:{etcd}" for host in ("etcd", EVERYWHERE, "localhost")},
            "127.0.0.1:8222": f"127.0.0.1:{monitor}",
            "/etc/nats/": f"{folder}/nats/",
            "/data": f"{folder}/data",
            "/certs/": f"{certificates}/",
        }
        self.ports = {service: tuple(ports[at * 3 : at * 3 + 3]) for at, service in enumerate(MODULES)}
        for service, content in self.secure["services"].items():
            (folder / service).mkdir()
            for each in content.get("secrets", ()):
                file = certificates / Path(self.secure["secrets"][each["source"]]["file"]).name
                (folder / service / each["target"]).symlink_to(file)
        server = self.translated("nats", (DEPLOY / "security/nats-server.conf").read_text())
        (folder / "nats/nats-server.conf").write_text(server)
        (folder / "nats/nats-accounts.conf").symlink_to(certificates / "nats-accounts.conf")

    def translated(self, service: str, text: str) -> str:
        """Returns text of a container as it is on this machine."""
        for old, new in self.servers.items():
            text = text.replace(old, new)
        _, ops, _ = self.ports.get(service, (0, 0, 0))
        return text.replace("/run/secrets/", f"{self.folder}/{service}/").replace("localhost:9090", f"localhost:{ops}")

    def environment(self, service: str) -> dict[str, str]:
        """Returns the environment that both files give a container, with what its image sets."""
        given = self.plain.get(service, {}).get("environment", {}) | self.secure["services"][service]["environment"]
        found = {name: self.translated(service, value) for name, value in given.items()}
        if service in self.ports:
            bind, ops, http = self.ports[service]
            found |= {"KVROUTER_BIND": f"127.0.0.1:{bind}", "KVROUTER_HTTP_BIND": f"127.0.0.1:{ops}"}
            found |= {"KVROUTER_HOST": "127.0.0.1", "KVROUTER_PORT": str(http), "KVROUTER_ADVERTISE": "127.0.0.1"}
        return service_environment(os.environ) | {"PATH": f"{BIN}:{os.environ['PATH']}"} | found

    def command(self, service: str) -> list[str]:
        return [self.translated(service, each) for each in self.secure["services"][service]["command"]]

    async def healthy(self, service: str) -> None:
        """Waits until the container's health check succeeds."""
        check = self.secure["services"][service].get("healthcheck") or self.plain[service]["healthcheck"]
        _, *command = (self.translated(service, each) for each in check["test"])
        command[0] = sys.executable if command[0] == "python" else command[0]
        async with asyncio.timeout(60):
            while await finished(command, service_environment(os.environ) | {"PATH": f"{BIN}:{os.environ['PATH']}"}):
                await asyncio.sleep(0.1)


async def finished(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Returns the exit status of a command."""
    output = subprocess.DEVNULL
    running = await asyncio.create_subprocess_exec(*command, env=dict(environment), stdout=output, stderr=output)
    return await running.wait()


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """The files of the commands at the head of the sample."""
    folder = tmp_path / "certs"
    workers = [f"--worker=workers/{number}" for number in (1, 2)]
    made = CliRunner().invoke(app, ["certs", str(folder), "--host", "nats", "--host", "etcd", *workers])
    assert made.exit_code == 0, made.output
    return folder


@pytest.fixture
def key(certificates: Path) -> str:
    made = CliRunner().invoke(app, ["keys", "create", "demo", "--file", str(certificates / "api-keys.json")])
    assert made.exit_code == 0, made.output
    return next(word for word in made.output.split() if word.startswith("kvr-"))


@pytest.fixture
async def sample(tmp_path: Path, certificates: Path, key: str) -> AsyncIterator[Sample]:
    (tmp_path / "run").mkdir()
    made = Sample(tmp_path / "run", certificates)
    peer = f"http://127.0.0.1:{made.etcd_peer}"
    members = (
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"default={peer}",
    )
    commands: dict[str, tuple[str, ...]] = {
        "nats": ("nats-server", *made.command("nats")),
        "etcd": (*made.command("etcd"), *members),
        **{service: (sys.executable, "-m", f"kvrouter.{module}") for service, module in MODULES.items()},
    }
    async with AsyncExitStack() as exits:
        for service, command in commands.items():
            if service == "indexer":
                for server in ("nats", "etcd"):
                    await made.healthy(server)
                assert await finished(made.command("accounts"), made.environment("accounts")) == 0
            program = (str(BIN / command[0]) if "/" not in command[0] else command[0], *command[1:])
            environment: dict[str, Any] = made.environment(service) if service in MODULES else dict(os.environ)
            process = await ManagedProcess.start(Command(service, program, environment), tmp_path)
            exits.push_async_callback(process.stop, 10)
        yield made


async def test_a_request_with_a_key_passes_through_the_secured_sample(sample: Sample, key: str) -> None:
    for service in MODULES:
        await sample.healthy(service)
    trusting = Tls(TlsOptions(ca_file=str(sample.certificates / "ca.crt"))).client_context()
    url = f"https://localhost:{sample.ports['frontend'][2]}/v1/completions"
    async with aiohttp.ClientSession() as session:

        async def status(headers: dict[str, str]) -> int:
            body = {"model": "mock-model", "prompt": list(range(64)), "max_tokens": 4}
            async with session.post(url, json=body, headers=headers, ssl=trusting) as response:
                return response.status

        assert await status({}) == 401
        async with asyncio.timeout(60):
            while await status({"authorization": f"Bearer {key}"}) != 200:
                await asyncio.sleep(0.1)
