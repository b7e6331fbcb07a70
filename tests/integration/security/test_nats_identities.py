"""Every way to authenticate in NATS is admitted with the right secret, and with a wrong one refused with advice."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from kvrouter.devtools.system.certificates import write_file
from kvrouter.devtools.system.servers import NatsServer
from kvrouter.net.nats.access import NatsAccess
from kvrouter.net.nats.connection import connect_nats
from kvrouter.runtime.telemetry.connection_metrics import NatsMetrics
from nats.errors import Error as NatsError
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from .nats_identities import identity


@pytest.mark.parametrize("kind", ["password", "token", "nkey", "credentials"])
async def test_a_wrong_secret_is_reported_and_a_corrected_file_suffices(kind: str, tmp_path: Path) -> None:
    known = identity(kind, tmp_path / "secrets")
    server = NatsServer(tmp_path / "nats", settings=known.settings)
    await server.start()
    right = known.secret.read_bytes()
    write_file(known.secret, known.wrong, 0o600)
    metrics = NatsMetrics(CollectorRegistry())

    async def connected() -> str:
        access = NatsAccess(server.url, **known.options)  # type: ignore[arg-type]
        async with connect_nats(access, "test", metrics) as client:
            await client.jetstream(timeout=10).add_stream(name="s", subjects=["s"])
            return (await client.jetstream(timeout=10).publish("s", b"")).stream

    try:
        with capture_logs() as logs:
            connecting = asyncio.create_task(connected())
            async with asyncio.timeout(60):
                while not any(line["event"] == "nats.error" for line in logs) and not connecting.done():
                    await asyncio.sleep(0.02)
                write_file(known.secret, right, 0o600)
                assert await connecting == "s"
        refusal = next(line["error"] for line in logs if line["event"] == "nats.error")
        assert "NATS refused the identity of this process" in refusal
        assert "check --nats-" in refusal
        shown = repr(logs) + server.log_path.read_text()
        assert not [part for part in (right + known.wrong).decode().split() if len(part) > 50 and part in shown]
        assert "open-sesame" not in shown
        assert "hunter-two" not in shown
    finally:
        await server.kill()


async def test_a_connection_survives_the_rotation_of_its_password(tmp_path: Path) -> None:
    known = identity("password", tmp_path / "secrets")
    server = NatsServer(tmp_path / "nats", settings=known.settings)
    await server.start()
    try:
        access = NatsAccess(server.url, **known.options)  # type: ignore[arg-type]
        async with connect_nats(access, "test", NatsMetrics(CollectorRegistry())) as client, asyncio.timeout(60):
            config = tmp_path / "nats" / "nats-server.conf"
            config.write_text(config.read_text().replace("open-sesame", "hunter-two"))
            assert server.pid is not None
            os.kill(server.pid, signal.SIGHUP)
            while client.is_connected:
                await asyncio.sleep(0.02)
            write_file(known.secret, known.wrong, 0o600)
            while True:
                try:
                    await client.flush(timeout=1)
                    break
                except NatsError:
                    await asyncio.sleep(0.02)
    finally:
        await server.kill()
