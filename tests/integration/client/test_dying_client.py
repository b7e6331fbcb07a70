"""A client process that is killed leaves no bookings behind."""

from __future__ import annotations

import asyncio
import sys

from ..frontend.gateway import MODEL, running_system

PROGRAM = """
import sys, threading
from kvrouter.client import SyncClient

with SyncClient(sys.argv[1], model=sys.argv[2]) as client:
    for number in range(3):
        client.best_worker(range(64), request_id=f"request {number}")
    print("booked", flush=True)
    threading.Event().wait()
"""


async def test_bookings_of_a_killed_client_are_freed(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace) as system:
        await system.start_worker(1)
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, system.target, MODEL), stdout=asyncio.subprocess.PIPE
        )
        assert client.stdout is not None
        async with asyncio.timeout(30):
            assert await client.stdout.readline() == b"booked\n"
        assert await system.booked() == [3]
        client.kill()
        await client.wait()
        await system.until_idle()
