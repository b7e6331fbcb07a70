"""A whole process on the runtime: it starts, gets ready, serves, and stops on a signal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import with_parent
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.process.context import Runtime, open_runtime
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import FindMatchesRequest
from kvrouter.v1.registry_pb2 import ServiceRegistration

INDEXER = indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"]

SCRIPT = """
import asyncio, sys
from pathlib import Path
from kvrouter.runtime.process.context import open_runtime
from kvrouter.runtime.process.hosting import Hosted, host
from kvrouter.runtime.process.lifecycle import run
from kvrouter.runtime.config.settings import ServiceSettings, load
from kvrouter.v1.indexer_pb2 import FindMatchesResponse

here = Path(sys.argv.pop(1))
settings = load(ServiceSettings, prog="tester")

class Indexer:
    async def find_matches(self, request, *, deadline):
        (here / "called").touch()
        while request.component.name == "slow" and not (here / "go-on").exists():
            await asyncio.sleep(0.01)
        return FindMatchesResponse()

async def main(stopping):
    if (here / "fail").exists():
        raise RuntimeError("broken")
    async with open_runtime(settings) as runtime:
        service = Hosted("indexer", Indexer(),
                         (here / "ready").exists)
        await host(runtime, [service], stopping)

run(main, settings, "tester")
"""


class Process:
    """The script above, running."""

    def __init__(self, child: asyncio.subprocess.Process, here: Path) -> None:
        self.child = child
        self.here = here

    async def ended(self) -> tuple[int, list[dict[str, Any]]]:
        _, stderr = await self.child.communicate()
        assert self.child.returncode is not None
        return self.child.returncode, [json.loads(line) for line in stderr.splitlines()]


@asynccontextmanager
async def started(here: Path, settings: ServiceSettings, *argv: str) -> AsyncIterator[Process]:
    flags = ["--etcd", settings.etcd, "--nats", settings.nats, "--namespace", settings.namespace, *argv]
    child = await asyncio.create_subprocess_exec(
        *with_parent(sys.executable, "-c", SCRIPT, str(here), "--instance-id", "one", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            yield Process(child, here)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.fixture
def settings(nats_url: str, etcd_endpoint: str, namespace: str) -> ServiceSettings:
    return ServiceSettings(nats=nats_url, etcd=etcd_endpoint, namespace=namespace, instance_id="watcher")


@pytest.fixture
async def watcher(settings: ServiceSettings) -> AsyncIterator[Runtime]:
    async with open_runtime(settings) as runtime:
        yield runtime


async def registered(watcher: Runtime, *, ready: bool) -> ServiceRegistration:
    await watcher.directory.wait_for(
        lambda it: "one" in it.services("indexer") and it.services("indexer")["one"].ready == ready
    )
    return watcher.directory.services("indexer")["one"]


async def until_refused(stub: Any) -> None:
    while True:
        await stub.find_matches(FindMatchesRequest(), deadline=Deadline.after(60))


async def get(address: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
        return response.status, await response.text()


async def test_a_hangup_does_not_end_the_process(tmp_path: Path, settings: ServiceSettings, watcher: Runtime) -> None:
    (tmp_path / "ready").touch()
    async with started(tmp_path, settings) as process:
        found = await registered(watcher, ready=True)
        process.child.send_signal(signal.SIGHUP)
        assert (await get(found.http_endpoint, "/ready"))[0] == 200
        process.child.send_signal(signal.SIGTERM)
        status, lines = await process.ended()
    assert status == 0
    assert [line["event"] for line in lines if line["event"] in {"service.hangup", "service.stopping"}] == [
        "service.hangup",
        "service.stopping",
    ]


async def test_readiness_shows_everywhere(tmp_path: Path, settings: ServiceSettings, watcher: Runtime) -> None:
    async with started(tmp_path, settings) as process:
        found = await registered(watcher, ready=False)
        assert (await get(found.http_endpoint, "/health"))[0] == 200
        status, body = await get(found.http_endpoint, "/ready")
        assert status == 503
        assert json.loads(body) == {"ready": False, "services": {"kvrouter.v1.IndexerService": False}}
        (tmp_path / "ready").touch()
        found = await registered(watcher, ready=True)
        assert (await get(found.http_endpoint, "/ready"))[0] == 200
        _, metrics = await get(found.http_endpoint, "/metrics")
        assert "kvrouter_directory_workers 0.0" in metrics
        assert "process_resident_memory_bytes" in metrics
        (tmp_path / "ready").unlink()
        await registered(watcher, ready=False)
        process.child.send_signal(signal.SIGTERM)
        assert (await process.ended())[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_withdraws_drains_and_exits_with_0(
    tmp_path: Path, settings: ServiceSettings, watcher: Runtime, number: signal.Signals
) -> None:
    (tmp_path / "ready").touch()
    async with started(tmp_path, settings) as process:
        found = await registered(watcher, ready=True)
        channel = open_channel(found.endpoint)
        stub = remote(INDEXER, channel)
        slow = asyncio.ensure_future(
            stub.find_matches(FindMatchesRequest(component=Component(name="slow")), deadline=Deadline.after(60))
        )
        while not (tmp_path / "called").exists():
            await asyncio.sleep(0.01)
        process.child.send_signal(number)
        await watcher.directory.wait_for(lambda it: not it.services("indexer"))
        with pytest.raises(KvRouterError) as refused:
            await until_refused(stub)
        assert refused.value.info.retry_elsewhere
        assert not slow.done()
        (tmp_path / "go-on").touch()
        await slow
        status, lines = await process.ended()
        assert status == 0
        assert lines[-1]["event"] == "service.stopped"
        await channel.close()


async def test_a_second_signal_stops_at_once(tmp_path: Path, settings: ServiceSettings, watcher: Runtime) -> None:
    (tmp_path / "ready").touch()
    async with started(tmp_path, settings, "--drain-seconds", "3600") as process:
        found = await registered(watcher, ready=True)
        async with open_channel(found.endpoint) as channel:
            slow = asyncio.ensure_future(
                remote(INDEXER, channel).find_matches(
                    FindMatchesRequest(component=Component(name="slow")), deadline=Deadline.after(60)
                )
            )
            while not (tmp_path / "called").exists():
                await asyncio.sleep(0.01)
            process.child.send_signal(signal.SIGTERM)
            await watcher.directory.wait_for(lambda it: not it.services("indexer"))
            process.child.send_signal(signal.SIGTERM)
            status, _ = await process.ended()
            assert status == 1
            with pytest.raises(KvRouterError):
                await slow


async def test_a_failure_is_one_event_and_status_1(tmp_path: Path, settings: ServiceSettings) -> None:
    (tmp_path / "fail").touch()
    async with started(tmp_path, settings) as process:
        status, lines = await process.ended()
    assert status == 1
    assert [line["event"] for line in lines] == ["service.failed"]
    assert "RuntimeError: broken" in lines[0]["exception"]


@pytest.mark.parametrize("flag", ["--bind", "--http-bind"])
async def test_a_taken_address_is_one_line(tmp_path: Path, settings: ServiceSettings, flag: str) -> None:
    port = free_port()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with server, started(tmp_path, settings, flag, f"127.0.0.1:{port}") as process:
        status, lines = await process.ended()
    assert status == 1
    assert lines[-1]["cause"].startswith(f"cannot listen on 127.0.0.1:{port}")
    assert flag in lines[-1]["cause"]
    assert "exception" not in lines[-1]


async def test_a_second_process_of_the_same_id_makes_the_first_stop(
    tmp_path: Path, settings: ServiceSettings, watcher: Runtime
) -> None:
    (tmp_path / "ready").touch()
    async with started(tmp_path, settings) as first:
        await registered(watcher, ready=True)
        async with started(tmp_path, settings):
            status, lines = await first.ended()
    assert status == 1
    assert "another process registered" in lines[-1]["cause"]
