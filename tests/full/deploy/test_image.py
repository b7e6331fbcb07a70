"""The steps of the container image, executed in an empty root file system: no container engine is needed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvrouter.devtools.system.ports import free_ports

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("image_root.sh")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare, to make a root file system"
)


@dataclass
class Stage:
    """What a stage of the Dockerfile says, by instruction, in order."""

    instructions: list[tuple[str, str]]

    def last(self, name: str) -> str:
        return [text for instruction, text in self.instructions if instruction == name][-1]

    @property
    def environment(self) -> list[str]:
        return shlex.split(self.last("ENV"))

    @property
    def step(self) -> str:
        return re.sub(r"--mount=\S+", "", self.last("RUN")).strip()

    @property
    def command(self) -> list[str]:
        return list(json.loads(self.last("CMD")))

    @property
    def health_check(self) -> list[str]:
        return list(json.loads(self.last("HEALTHCHECK").partition("CMD ")[2]))


def stage(name: str) -> Stage:
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    instructions: list[tuple[str, str]] = []
    current = ""
    for line in text.splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            current = rest.rpartition(" AS ")[2]
        elif instruction and instruction != "#" and current == name:
            instructions.append((instruction, rest.strip()))
    return Stage(instructions)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage leaves behind, as far as later stages use it."""
    directory = tmp_path_factory.mktemp("source")
    subprocess.run(["make", "-s", "wheels", f"WHEELS={directory / 'dist'}"], cwd=ROOT, check=True)
    shutil.copy(ROOT / "constraints.txt", directory)
    return directory


@dataclass
class Container:
    process: subprocess.Popen[bytes]
    log: Path
    metrics_port: int

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs a command inside, as root."""
        enter = ["nsenter", "--target", str(self.process.pid), "--mount", "--root", "--wd=/"]
        environment = ["/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/bin:/bin"]
        return subprocess.run([*enter, *environment, *command], check=False, capture_output=True, text=True)


@pytest.fixture
def container(source: Path, tmp_path: Path, nats_url: str, etcd_endpoint: str) -> Iterator[Container]:
    """The image's command, running as the image's user in the image's root, which is read-only."""
    grpc, metrics, http = free_ports(3)
    services = stage("services")
    environment = [
        *(each.replace("0.0.0.0:7000", f"127.0.0.1:{grpc}").replace(":9090", f":{metrics}")
          for each in services.environment),
        f"KVROUTER_PORT={http}", f"KVROUTER_ETCD={etcd_endpoint}", f"KVROUTER_NATS={nats_url}",
    ]  # fmt: skip
    root = tmp_path / "root"
    root.mkdir()
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "bash", str(SCRIPT), str(root), str(source), sys.executable, services.step,
             services.last("USER"), *environment, *services.command],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    running = Container(process, log, metrics)
    try:
        yield running
    finally:
        process.terminate()
        process.wait(timeout=60)


def until_ready(container: Container) -> None:
    check = [word.replace(":9090", f":{container.metrics_port}") for word in stage("services").health_check]
    for _ in range(600):
        assert container.process.poll() is None, container.log.read_text()[-4000:]
        if "service.ready" in container.log.read_text() and container.run(*check).returncode == 0:
            return
        time.sleep(0.5)
    raise AssertionError(container.log.read_text()[-4000:])


def test_the_image_runs_as_its_user_in_a_read_only_root(container: Container) -> None:
    until_ready(container)
    status = Path(f"/proc/{container.process.pid}/status").read_text()
    assert re.search(r"^Uid:\s+10001\s+10001\s+10001\s+10001$", status, re.MULTILINE)
    for path in ("/file", "/etc/file", "/usr/local/file", "/usr/file"):
        assert "Read-only file system" in container.run("/usr/bin/touch", path).stderr
    assert container.run("kvrouter", "--version").returncode == 0
    assert "kvrouter" in container.run("/bin/cat", "/etc/passwd").stdout
    container.process.terminate()
    assert container.process.wait(timeout=60) == 0, container.log.read_text()[-4000:]
