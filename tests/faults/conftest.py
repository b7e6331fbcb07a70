"""A rig for each scenario, and a seed that can be set: KVROUTER_SEED. KVROUTER_FAULTS=full runs the long forms."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from kvrouter.devtools.system.servers import EtcdServer, NatsServer

from . import newer_etcd
from .processes import Processes, system
from .rig import Rig


@pytest.fixture
def seed(record_property: Callable[[str, object], None]) -> int:
    """Seed of a scenario: ``KVROUTER_SEED``, or a new one. It is printed when the test fails."""
    seed = int(os.environ.get("KVROUTER_SEED", random.SystemRandom().randrange(1 << 32)))
    record_property("seed", seed)
    print(f"KVROUTER_SEED={seed}")  # noqa: T201 - pytest shows it where a test fails
    return seed


@pytest.fixture
def nats_server(tmp_path: Path) -> NatsServer:
    """The NATS of a rig; a module of tests may have one of another kind."""
    return NatsServer(tmp_path / "nats")


@pytest.fixture
async def rig(
    tmp_path: Path, nats_server: NatsServer, seed: int, record_property: Callable[[str, object], None]
) -> AsyncIterator[Rig]:
    """Servers of the test's own. What its Indexers' logs tell goes into a report (``--junitxml``)."""
    servers = nats_server, EtcdServer(tmp_path / "etcd", binary=newer_etcd.find())
    async with AsyncExitStack() as exits:
        rig = Rig(tmp_path, *servers, random.Random(seed), exits)
        try:
            for server in servers:
                await server.start()
            yield rig
            await exits.aclose()
            for name, process in rig.judged.items():
                record_property(name, process.observed())
        finally:
            for process in rig.indexers:
                await process.kill()
            for server in servers:
                await server.kill()


@pytest.fixture
async def processes(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Processes]:
    """Services as processes, in a namespace of the test's own."""
    async with system(nats_url, etcd_endpoint, namespace) as found:
        yield found
