"""Wall clocks jump by an hour and return, while streams begin and end, and processes start by either time.

Clients see no more of it than of the restarts, and in the end all load tables are empty, and each Indexer equals the
engines' own block tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from .fleet import INDEXERS, SCHEDULERS, WORKERS, Registration, fleet
from .outcomes import MayBeUnavailable, judge, none, observed, those_with_output_of_it
from .settle import settle
from .traffic import traffic

pytestmark = pytest.mark.timeout(300)

_HOUR_SECONDS = 3600
_REPLICA_SYNC = ("--replica-sync", "--replica-heartbeat-seconds", "0.2")


@dataclass(frozen=True)
class Jump:
    """Clocks of these processes jump; the first of them is also killed and started, before and after the return."""

    of: str
    names: tuple[str, ...]
    seconds: int
    may_be_unavailable: MayBeUnavailable

    def __str__(self) -> str:
        return f"{self.of} {'forward' if self.seconds > 0 else 'back'}"


JUMPS = [
    jump
    for seconds in (-_HOUR_SECONDS, _HOUR_SECONDS)
    for jump in (
        Jump("a worker", tuple(WORKERS)[:1], seconds, those_with_output_of_it),
        Jump("all workers", tuple(WORKERS), seconds, those_with_output_of_it),
        Jump("a Scheduler", SCHEDULERS[:1], seconds, none),
        Jump("services", (*SCHEDULERS, INDEXERS[0], "frontend-0"), seconds, none),
    )
]


@pytest.mark.full
@pytest.mark.parametrize("jump", JUMPS, ids=str)
async def test_clocks_jump_and_return_while_streams_begin_and_end(
    jump: Jump, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    async with fleet(tmp_path) as system:
        await system.start_all(scheduler_options=_REPLICA_SYNC, shifted_clocks=True)
        async with traffic(system, seed) as clients:
            await clients.until_ended(20)
            for offset in (jump.seconds, 0):
                for name in jump.names:
                    system.shift_clock(name, offset)
                await clients.until_all_serve()
                # An Indexer that starts now takes in what others wrote by the shifted clocks.
                for name in (jump.names[0], INDEXERS[1]):
                    await system.kill(name)
                    await system.restart(name)
                assert hours_ahead(system.registration(jump.names[0])) == offset // _HOUR_SECONDS
                await clients.until_all_serve()
            streams = await clients.finish()
        record_property("observed", observed(streams))
        judge(streams, jump.names[0], jump.may_be_unavailable)
        await settle(system)


def hours_ahead(registration: Registration | None) -> int:
    """By how much the clock that a process registered by differs from the true one."""
    assert registration is not None
    return round((registration.registered_unix_ns / 1e9 - time.time()) / _HOUR_SECONDS)
