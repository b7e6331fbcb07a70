"""What earlier releases stored is read by this one: events, snapshots, registrations, dumps and recordings."""

from __future__ import annotations

import base64
import json
import tarfile
from pathlib import Path

import pytest
from google.protobuf.json_format import Parse
from kvrouter.net.etcd import connect
from kvrouter.simulator.workloads.traces import read
from kvrouter.v1.common_pb2 import RankState

from .capture_release import RELEASES
from .rig import COMPONENT, IndexerProcess, Rig
from .test_operator import command

Blocks = set[tuple[int, int, int, int]]


@pytest.fixture(params=sorted(RELEASES.iterdir()), ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    """Folder of what a release stored."""
    folder: Path = request.param
    return folder


def blocks_of(lines: str) -> dict[int, Blocks]:
    """The blocks of a dump, by worker."""
    found: dict[int, Blocks] = {}
    for line in lines.splitlines():
        state = Parse(line, RankState())
        found.setdefault(state.rank.worker_id, set()).update(
            (block.engine_hash, block.local_hash, block.sequence_hash, block.copies[0].copies) for block in state.blocks
        )
    return found


async def restore(rig: Rig, release: Path) -> None:
    """Puts what a release stored into NATS and etcd."""
    await rig.nats.stop()
    with tarfile.open(release / "nats.tar.gz") as archive:
        archive.extractall(rig.directory, filter="data")
    await rig.nats.start()
    async with connect(rig.etcd.endpoint) as client:
        for key, value in json.loads((release / "etcd.json").read_text()).items():
            name = base64.b64decode(key)
            if b"/services/" not in name:  # The registration of an Indexer went with its lease.
                # Other tests may use the ports of its workers by now, but not at this address.
                await client.put(name, base64.b64decode(value).replace(b"127.0.0.1:", b"127.0.0.9:"))


async def restored(indexer: IndexerProcess) -> bool:
    return len((await indexer.stats()).ranks) > 0


async def holds_the_dump(indexer: IndexerProcess, release: Path) -> bool:
    expected = blocks_of((release / "index.jsonl").read_text())
    return {worker_id: await indexer.held(worker_id) for worker_id in expected} == expected


async def test_an_indexer_restores_snapshot_and_events_of_an_earlier_release(rig: Rig, release: Path) -> None:
    await restore(rig, release)
    indexer = await rig.indexer("one", worker_grace_seconds=600)
    await rig.until(lambda: restored(indexer))
    stream = (await rig.client()).jetstream()
    for event in json.loads((release / "events.json").read_text()):
        await stream.publish(event["subject"], base64.b64decode(event["data"]))
    await rig.until(lambda: holds_the_dump(indexer, release))
    assert '"event": "snapshot.restored"' in indexer.log()
    assert '"event": "snapshot.unusable"' not in indexer.log()
    assert '"event": "rank.resynced"' not in indexer.log(), "the workers are gone: only stored state can be used"


async def test_a_dump_of_an_earlier_release_is_loaded(rig: Rig, release: Path) -> None:
    await rig.start_nodes(7)
    indexer = await rig.indexer("one", worker_grace_seconds=600)
    await rig.agree(indexer)
    status, output = await command(rig, indexer, "load", str(release / "index.jsonl"), str(COMPONENT))
    assert (status, "2 ranks" in output) == (0, True), output


def test_a_recording_of_an_earlier_release_is_a_trace(release: Path) -> None:
    workload = read(release / "recording.jsonl")
    assert [request.output_tokens for request in workload.requests] == [1, 2, 3, 4, 5]
    assert workload.piece_tokens == 8
