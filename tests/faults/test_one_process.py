"""Frontend and Scheduler in one process, and that twice: one Scheduler decides, and a killed process leaves nothing."""

from __future__ import annotations

import asyncio

from kvrouter.v1.errors import KvRouterError

from .processes import GRACE_SECONDS, UNSHARDED, Processes, cancelled, start_workers, streamed
from .rig import FULL

STREAMS = 250 if FULL else 50
"""Through each of the two."""
NAMES = ("both-0", "both-1")


async def test_one_of_two_decides_and_bookings_of_a_killed_process_end(processes: Processes) -> None:
    grace = ("--session-grace-seconds", str(GRACE_SECONDS), "--lease-seconds", "2")
    sync = ("--replica-sync", "--replica-heartbeat-seconds", "0.2", *UNSHARDED)
    for name in NAMES:
        await processes.start("scheduler,frontend", name, *grace, *sync, "--port", "0", "--router-mode", "round-robin")
    await start_workers(processes, 0.02)
    for name in NAMES:
        await processes.ready("scheduler", name)
        await processes.until_booked(name, 0)
        await processes.ready("frontend", name)
    first, second = await processes.deciding(2, NAMES)
    running = {
        name: [asyncio.create_task(streamed(processes.frontend(name), number, 1000)) for number in range(STREAMS)]
        for name in NAMES
    }
    try:
        for name in NAMES:
            await processes.until_booked(name, 2 * STREAMS)
        await processes.kill(first)
        lost = await asyncio.gather(*running[first], return_exceptions=True)
        assert all(isinstance(outcome, KvRouterError) for outcome in lost)
        seen = await processes.until_booked(second, STREAMS)
        assert seen <= {2 * STREAMS, STREAMS}, "sessions are re-asserted before lost ones are dropped"
        assert not any(task.done() for task in running[second])
        await cancelled(running[second])
        await processes.until_booked(second, 0)
    finally:
        await cancelled([task for tasks in running.values() for task in tasks])
