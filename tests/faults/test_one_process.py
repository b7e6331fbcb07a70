"""Frontend and Scheduler in one process, and that twice: one Scheduler decides, and a killed process leaves nothing."""

from __future__ import annotations

import asyncio

from kvrouter.runtime.errors import KvRouterError

from .processes import GRACE_SECONDS, PATIENCE_SECONDS, Processes, start_workers, streamed
from .rig import FULL

STREAMS = 250 if FULL else 50
"""Through each of the two."""
NAMES = ("both-0", "both-1")


async def deciding(processes: Processes) -> tuple[str, str]:
    """The process whose Scheduler holds the sessions of both Frontends, and the other one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            sessions = [(await processes.status(name)).sessions for name in NAMES]
            if sorted(sessions) == [0, 2]:
                return NAMES if sessions[0] else (NAMES[1], NAMES[0])
            await asyncio.sleep(0.05)


async def test_one_of_two_decides_and_what_it_had_goes_with_it(processes: Processes) -> None:
    grace = ("--session-grace-seconds", str(GRACE_SECONDS), "--lease-seconds", "2")
    sync = ("--replica-sync", "--replica-heartbeat-seconds", "0.2")
    for name in NAMES:
        await processes.start("scheduler,frontend", name, *grace, *sync, "--port", "0", "--router-mode", "round-robin")
    await start_workers(processes, 0.02)
    for name in NAMES:
        await processes.ready("scheduler", name)
        await processes.until_booked(name, 0)
        await processes.ready("frontend", name)
    first, second = await deciding(processes)
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
        assert seen <= {2 * STREAMS, STREAMS}, "what lives is told before what does not is dropped, and counts once"
        assert not any(task.done() for task in running[second])
        for task in running[second]:
            task.cancel()
        await processes.until_booked(second, 0)
    finally:
        every = [task for tasks in running.values() for task in tasks]
        for task in every:
            task.cancel()
        await asyncio.wait(every)
