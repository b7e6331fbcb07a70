"""Writes what this release stores, so that tests of later releases read it: python -m tests.faults.capture_release

Run it once for a release. The files go to tests/faults/releases/VERSION:

- ``nats.tar.gz``: the storage folder of nats-server, with the stream of events and the object store of snapshots
- ``events.json``: subject and data of each message of events, since those in the stream expire
- ``etcd.json``: every key, in base64
- ``index.jsonl``: what `kvrouter index dump` writes
- ``recording.jsonl``: what a Frontend records
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import shutil
import sys
import tarfile
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from kvrouter.core import local_hashes
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.frontend.recording.recorder import Outline, RecordingFile
from kvrouter.net.etcd import connect
from kvrouter.runtime.version import VERSION
from kvrouter.v1.names import namespace_prefix
from nats.aio.msg import Msg

from . import newer_etcd
from .rig import BLOCK_SIZE, COMPONENT, TAKEN, Rig
from .test_operator import command

RELEASES = Path(__file__).parent / "releases"


async def capture(target: Path) -> None:
    """Runs a small system and stores what it leaves behind."""

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        nats, etcd = NatsServer(directory / "nats"), EtcdServer(directory / "etcd", binary=newer_etcd.find())
        try:
            async with AsyncExitStack() as exits:
                rig = Rig(directory, nats, etcd, random.Random(1), exits)
                await nats.start()
                await etcd.start()
                try:
                    await _run(rig, target)
                finally:
                    for process in rig.indexers:
                        await process.kill()
            await nats.stop()
            with tarfile.open(target / "nats.tar.gz", "w:gz") as archive:
                archive.add(directory / "nats", "nats", filter=_without_log)
        finally:
            await nats.kill()
            await etcd.kill()
    _record(target / "recording.jsonl")


async def _run(rig: Rig, target: Path) -> None:
    events: list[Msg] = []

    async def keep(message: Msg) -> None:
        events.append(message)

    await (await rig.client()).subscribe(COMPONENT.events_wildcard, cb=keep)
    await rig.start_nodes(1, 2)
    indexer = await rig.indexer("one", snapshot_threshold=5)
    await rig.serve(10)
    await rig.agree(indexer)
    await rig.until(lambda: TAKEN in indexer.log())
    await rig.serve(3)  # events after the snapshot
    await rig.agree(indexer)
    status, output = await command(rig, indexer, "dump", "--output", str(target / "index.jsonl"))
    assert status == 0, output
    sent = [{"subject": each.subject, "data": base64.b64encode(each.data).decode()} for each in events]
    (target / "events.json").write_text(json.dumps(sent, indent=1) + "\n")
    async with connect(rig.etcd.endpoint) as client:
        keys = {
            pair.key: pair.value for pair in await client.get_prefix(namespace_prefix(COMPONENT.namespace).encode())
        }
    stored = {base64.b64encode(key).decode(): base64.b64encode(value).decode() for key, value in keys.items()}
    (target / "etcd.json").write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def _record(path: Path) -> None:
    rng = random.Random(1)
    file = RecordingFile(path, 1 << 20)
    for number in range(5):
        tokens = memoryview(rng.randbytes(4 * BLOCK_SIZE * 6)).cast("I")
        hashes = local_hashes(tokens, BLOCK_SIZE)
        file.append([Outline(number * 1_000_000_000, "m", BLOCK_SIZE, BLOCK_SIZE * 6 + 3, hashes, number + 1)])


def _without_log(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if member.name.endswith(".log") else member


def main() -> None:
    """Captures the release that is checked out."""
    target = RELEASES / VERSION
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    asyncio.run(capture(target))
    sys.stdout.write(f"{target.relative_to(Path.cwd())}\n")


if __name__ == "__main__":
    main()
