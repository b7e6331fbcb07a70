"""Streams by the thousand, opened at once and dropped: nothing is left of them, in load or in memory."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import grpc.aio
import pytest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import frontend_pb2
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions

from .processes import MODEL, Processes, cancelled, start_system
from .rig import FULL

STREAMS = 10_000 if FULL else 2_000
CLIENTS = 16 if FULL else 4
"""Each on a connection of its own, which takes 1,024 calls."""
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
PATIENCE_SECONDS = 240.0
"""Far above what ten thousand streams take."""
GROWTH = 1.2
"""Of memory from one round to the next that is none: allocators keep what they may need again."""
_FRONTEND = frontend_pb2.DESCRIPTOR.services_by_name["FrontendService"]


def resident_mb(processes: Processes) -> dict[str, float]:
    """Memory of the router's processes."""
    found = {}
    for name in ("scheduler-0", "frontend-0"):
        status = Path(f"/proc/{processes.running[name].pid}/status").read_text()
        found[name] = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return found


async def stream(frontend: Frontend, number: int) -> None:
    """A request that nobody lives to see the end of."""
    tokens = range(40 * number, 40 * number + 40)
    limit = StopConditions(max_tokens=1000)
    request = FrontendServiceGenerateRequest(model=MODEL, token_ids=TokenIds(ids=tokens), stop_conditions=limit)
    async with aclosing(frontend.generate(request, deadline=Deadline.never())) as pieces:
        async for _ in pieces:
            pass


@asynccontextmanager
async def streams(processes: Processes) -> AsyncIterator[list[grpc.aio.Channel]]:
    """As many as there should be, all of them booked; yields the connections that they are on."""
    endpoint = processes.directory.services("frontend")["frontend-0"].endpoint
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(endpoint, _OWN_CONNECTION))
            for _ in range(CLIENTS)
        ]
        frontends = [cast(Frontend, remote(_FRONTEND, channel)) for channel in channels]
        running = [asyncio.create_task(stream(frontends[each % CLIENTS], each)) for each in range(STREAMS)]
        try:
            await processes.until_booked("scheduler-0", STREAMS, PATIENCE_SECONDS)
            yield channels
        finally:
            await cancelled(running)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
async def test_streams_that_are_dropped_leave_nothing(processes: Processes) -> None:
    without_events = ("--no-kv-events",)
    await start_system(processes, schedulers=1, frontends=1, clock_factor=0.02, mode="kv", scheduler=without_events)
    used: list[dict[str, float]] = []
    for how in ("disconnected", "cancelled"):
        async with streams(processes) as channels:
            if how == "disconnected":
                for channel in channels:
                    await channel.close()
        await processes.until_booked("scheduler-0", 0, PATIENCE_SECONDS)
        left = await processes.status("scheduler-0")
        assert (left.bookings, left.components[0].queued.requests) == (0, 0)
        assert all(rank.active_blocks == rank.prefill_tokens == 0 for rank in left.components[0].ranks)
        used.append(resident_mb(processes))
    before, after = used
    assert all(after[name] < GROWTH * before[name] for name in after), used
