"""The secured compose files, with the files that the commands at their head write."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from kvrouter.cli.main import app
from kvrouter.net.tls import Tls, TlsOptions
from typer.testing import CliRunner

from .system import DEPLOY, System, started
from .traffic import client

OWNER = 12345

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The deployment files and certificates, which belong to a user of their own."""
    folder = tmp_path / "deploy"
    folder.mkdir()
    for name in ("compose.yaml", "compose.secure.yaml"):
        shutil.copy(DEPLOY / name, folder)
    shutil.copytree(DEPLOY / "security", folder / "security")
    workers = [f"--worker=workers/{number}" for number in (1, 2)]
    made = CliRunner().invoke(app, ["certs", str(folder / "certs"), "--host", "nats", "--host", "etcd", *workers])
    assert made.exit_code == 0, made.output
    return folder


@pytest.fixture
def key(folder: Path) -> str:
    made = CliRunner().invoke(app, ["keys", "create", "demo", "--file", str(folder / "certs/api-keys.json")])
    assert made.exit_code == 0, made.output
    return next(word for word in made.output.split() if word.startswith("kvr-"))


@pytest.fixture
async def system(
    images: dict[str, str], compose_command: str, tmp_path: Path, folder: Path, key: str
) -> AsyncIterator[System]:
    for path in (folder / "certs", *(folder / "certs").iterdir()):
        os.chown(path, OWNER, OWNER)
    files = [str(folder / name) for name in ("compose.yaml", "compose.secure.yaml")]
    async with started(compose_command, tmp_path, *files, environment={"OWNER": f"{OWNER}:{OWNER}"}) as running:
        yield running


async def test_a_request_needs_a_key_and_passes_encrypted_connections(system: System, folder: Path, key: str) -> None:
    trusting = Tls(TlsOptions(ca_file=str(folder / "certs/ca.crt"))).client_context()
    connector = aiohttp.TCPConnector(ssl=trusting)
    async with client(f"https://localhost:{system.http}", connector=connector) as nobody:
        assert await nobody.status() == 401
        nobody.session.headers["authorization"] = f"Bearer {key}"
        await nobody.served()
    for service in await system.running():
        assert f"Uid:\t{OWNER}\t{OWNER}\t{OWNER}\t{OWNER}" in system.process_status(service)
    assert system.state("accounts")["ExitCode"] == 0
    assert (await system.stop("frontend"))["ExitCode"] == 0
