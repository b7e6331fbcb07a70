"""Every kind of process is frozen, for a moment and for long, and killed, while streams begin and end.

What clients may see of it is in ``ALLOWED``. In the end all load tables are empty, and each Indexer equals the engines'
own block tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from . import newer_etcd
from .fleet import FRONTENDS, INDEXERS, LEASE_SECONDS, SERVERS, WORKERS, Fleet, fleet
from .outcomes import MayBeUnavailable, judge, none, observed, those_through_it, those_with_output_of_it
from .rig import FULL
from .settle import settle
from .traffic import Traffic, traffic

pytestmark = pytest.mark.timeout(300)

_MOMENT_SECONDS = 1.0
_KEEPALIVE_SECONDS = 32.0
"""Time after which gRPC takes a silent peer for lost. No option shortens it, so the short forms end before."""
_REPLICA_SYNC = ("--replica-sync", "--replica-heartbeat-seconds", "0.2")


class Part(StrEnum):
    """What the fault strikes."""

    FRONTEND = "frontend"
    DECIDING_SCHEDULER = "deciding scheduler"
    OTHER_SCHEDULER = "other scheduler"
    INDEXER = "indexer"
    WORKER = "worker"
    NATS = "nats"
    ETCD = "etcd"


class Fault(StrEnum):
    """How it strikes."""

    FROZEN = "frozen for less than its lease"
    FROZEN_FOR_LONG = "frozen for longer than its lease"
    KILLED = "killed and started again"


ALLOWED: dict[Part, dict[Fault, MayBeUnavailable]] = {
    Part.FRONTEND: {Fault.FROZEN: none, Fault.FROZEN_FOR_LONG: those_through_it, Fault.KILLED: those_through_it},
    Part.DECIDING_SCHEDULER: dict.fromkeys(Fault, none),
    Part.OTHER_SCHEDULER: dict.fromkeys(Fault, none),
    Part.INDEXER: dict.fromkeys(Fault, none),
    Part.WORKER: {
        Fault.FROZEN: none,
        Fault.FROZEN_FOR_LONG: those_with_output_of_it,
        Fault.KILLED: those_with_output_of_it,
    },
    Part.NATS: dict.fromkeys(Fault, none),
    Part.ETCD: dict.fromkeys(Fault, none),
}
"""Which streams may end with UNAVAILABLE; all others end well."""


@dataclass(frozen=True)
class Scenario:
    part: Part
    fault: Fault
    replica_sync: bool = False

    def __str__(self) -> str:
        return f"{self.part} {self.fault}{', replica sync' if self.replica_sync else ''}"


SCHEDULER_PARTS = (Part.DECIDING_SCHEDULER, Part.OTHER_SCHEDULER)
MATRIX = (
    *(Scenario(part, fault) for part in Part for fault in Fault),
    *(Scenario(part, fault, replica_sync=True) for part in SCHEDULER_PARTS for fault in Fault),
)
SHORT = Scenario(Part.DECIDING_SCHEDULER, Fault.FROZEN_FOR_LONG)
"""The one outside of the long form. Other modules have short scenarios with the other parts and faults."""


@pytest.mark.full
@pytest.mark.parametrize("scenario", MATRIX if FULL else [SHORT], ids=str)
async def test_a_process_is_struck_while_streams_begin_and_end(
    scenario: Scenario, tmp_path: Path, seed: int, record_property: Callable[[str, object], None]
) -> None:
    if scenario == Scenario(Part.ETCD, Fault.KILLED) and newer_etcd.find() is None:
        pytest.skip("no etcd that may be killed: set KVROUTER_ETCD_BINARY, or run tests/faults/newer_etcd.py")
    async with fleet(tmp_path) as system:
        await system.start_all(scheduler_options=_REPLICA_SYNC if scenario.replica_sync else ())
        async with traffic(system, seed) as clients:
            await clients.until_ended(20)
            struck = await process_of(scenario.part, system)
            await strike(scenario.fault, struck, system, clients)
            await clients.until_all_serve()
            streams = await clients.finish()
        record_property("observed", observed(streams))
        judge(streams, struck, ALLOWED[scenario.part][scenario.fault])
        await settle(system)


async def process_of(part: Part, system: Fleet) -> str:
    match part:
        case Part.FRONTEND:
            return FRONTENDS[0]
        case Part.DECIDING_SCHEDULER:
            return (await system.deciding_scheduler())[0]
        case Part.OTHER_SCHEDULER:
            return (await system.deciding_scheduler())[1]
        case Part.INDEXER:
            return INDEXERS[0]
        case Part.WORKER:
            return next(iter(WORKERS))
        case _:
            return part.value


async def strike(fault: Fault, name: str, system: Fleet, clients: Traffic) -> None:
    """Returns when the process runs again."""
    match fault:
        case Fault.KILLED:
            await system.kill(name)
            await clients.until_ended(15)
            await system.restart(name)
        case Fault.FROZEN:
            system.freeze(name)
            await asyncio.sleep(_MOMENT_SECONDS)
            system.resume(name)
        case Fault.FROZEN_FOR_LONG:
            froze, first = time.monotonic(), len(clients.streams)
            system.freeze(name)
            if name in SERVERS:
                await asyncio.sleep(2 * LEASE_SECONDS)
            else:
                await system.until_unregistered(name)
            if FULL:
                await asyncio.sleep(froze + _KEEPALIVE_SECONDS - time.monotonic())
            # Those that began meanwhile do not wait for it to come back.
            await clients.until_ended_since(first, except_through=name)
            system.resume(name)
