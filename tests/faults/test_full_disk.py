"""JetStream without disk space: the index follows its workers all the same, and goes on when space returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import full_disk
from .full_disk import NatsOnSmallDisk
from .rig import Rig

DISK_BYTES = 16 << 20

pytestmark = pytest.mark.skipif(bool(full_disk.unavailable()), reason=full_disk.unavailable())


@pytest.fixture
def nats_server(tmp_path: Path) -> NatsOnSmallDisk:
    return NatsOnSmallDisk(tmp_path / "nats", DISK_BYTES)


async def test_the_index_follows_its_workers_while_the_disk_is_full(rig: Rig, nats_server: NatsOnSmallDisk) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    nats_server.fill()
    await rig.serve(30)
    await rig.agree(one)
    await rig.serve(10)
    await rig.agree(one)

    async def said() -> bool:
        return all(rank.silent for rank in (await one.stats()).ranks)

    await rig.until(said)
