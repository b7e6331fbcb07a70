"""What an operator does with ``kvrouter index`` on a system that runs."""

from __future__ import annotations

import asyncio
import re
import struct
import sys

import pytest
from google.protobuf.json_format import MessageToJson, Parse
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import connect
from kvrouter.v1.common_pb2 import RankState
from xxhash import xxh3_64_intdigest

from .rig import COMPONENT, IndexerProcess, Rig


async def command(rig: Rig, process: IndexerProcess, *arguments: str) -> tuple[int, str]:
    """Exit status and output of ``kvrouter index …``."""
    endpoint = await rig.endpoint_of(process)
    verb, *rest = arguments
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "index", verb, "--indexer", endpoint, *rest),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await running.communicate()
    return running.returncode or 0, output.decode()


async def test_every_command_does_what_it_says(rig: Rig) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    dumped = str(rig.directory / "index.jsonl")

    # Its events may reach the Indexer before a rank is compared with its worker.
    await rig.until(lambda: are_verified(one))
    status, output = await command(rig, one, "status")
    assert (status, "faults/pool: ready, transport durable" in output) == (0, True), output
    stats = await one.stats()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    for rank, row in zip(stats.ranks, rows, strict=True):
        expected = (rank.cursor.incarnation, rank.cursor.next_event_id, rank.blocks)
        assert row[:4] == [f"{rank.rank.worker_id}:0", *map(str, expected)]
        assert row[5:7] == ["0", "verified"]
        assert row[7].startswith("registered, ")
        assert row[8] == "durable"
        assert re.fullmatch(r"\d+ s ago", row[9]), "the age of the evidence"
    status, output = await command(rig, one, "verify")
    assert (status, output.count("same")) == (0, 2), output
    status, output = await command(rig, one, "dump", "--output", dumped)
    assert status == 0, output
    status, output = await command(rig, one, "load", dumped)
    assert (status, "2 ranks" in output) == (0, True), output
    status, output = await command(rig, one, "resync", "--rank", "1")
    assert (status, "ranks replaced: 1, out of reach: 0" in output) == (0, True), output
    status, output = await command(rig, one, "snapshot", "faults/pool")
    assert (status, "up to message" in output) == (0, True), output
    status, output = await command(rig, one, "reset")
    assert (status, "snapshots 1" in output) == (0, True), output
    await rig.agree(one)
    await rig.serve(3)
    await rig.agree(one)


@pytest.mark.full
async def test_a_dump_fills_an_indexer_elsewhere(rig: Rig) -> None:
    nodes = await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    dumped = str(rig.directory / "index.jsonl")
    assert (await command(rig, one, "dump", "--output", dumped))[0] == 0
    place = rig.directory / "elsewhere"
    elsewhere = Rig(place, NatsServer(place / "nats"), EtcdServer(place / "etcd"), rig.rng, rig.exits)
    for server in (elsewhere.nats, elsewhere.etcd):
        rig.exits.push_async_callback(server.kill)
        await server.start()
    async with connect(rig.etcd.endpoint) as here, connect(elsewhere.etcd.endpoint) as there:
        descriptor = await here.get(COMPONENT.descriptor_key.encode())
        await there.put(COMPONENT.descriptor_key.encode(), descriptor.value)
    other = await elsewhere.indexer("other", worker_grace_seconds=3600)
    rig.exits.push_async_callback(other.kill)
    await elsewhere.until(lambda: has_component(other))
    status, output = await command(elsewhere, other, "load", dumped)
    assert (status, "2 ranks" in output) == (0, True), output
    for node in nodes:
        assert await other.held(node.worker.config.worker_id) == node.holds()
    stats = await other.stats()
    assert [(rank.cursor.incarnation, rank.cursor.next_event_id) for rank in stats.ranks] == [n.cursor for n in nodes]


def digest(state: RankState) -> int:
    """As the contract defines it; a dump whose digest differs is refused."""
    terms = (
        struct.pack("<4Q", block.engine_hash, block.sequence_hash, held.tier, held.copies)
        for block in state.blocks
        for held in block.copies
    )
    return sum(xxh3_64_intdigest(term, seed=1337) for term in terms) % (1 << 64)


async def are_verified(process: IndexerProcess) -> bool:
    return all(rank.verified for rank in (await process.stats()).ranks)


async def has_component(process: IndexerProcess) -> bool:
    return (await process.stats()).ready


@pytest.mark.full
async def test_verify_prints_differences_and_resync_repairs_them(rig: Rig) -> None:
    (node, _) = await rig.start_nodes(1, 2, heartbeat_seconds=3600)  # whose digest would put it right by itself
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    dumped = rig.directory / "index.jsonl"
    assert (await command(rig, one, "dump", "--rank", "1", "--output", str(dumped)))[0] == 0
    (line,) = dumped.read_text().splitlines()
    state = Parse(line, RankState())
    forgotten = state.blocks.pop().engine_hash  # parents come before children, so nothing is below it
    changed = state.blocks[-1].engine_hash
    invented = state.blocks[-1].engine_hash = changed ^ 1
    state.digest = digest(state)
    assert {forgotten, changed} <= node.engine.cached_blocks().keys()
    dumped.write_text(MessageToJson(state, indent=None))
    status, output = await command(rig, one, "load", str(dumped))
    assert (status, "1 ranks" in output) == (0, True), output

    status, output = await command(rig, one, "verify")
    assert (status, output.count("differs"), output.count("same")) == (1, 1, 1), output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    assert sorted(row for row in rows if len(row) == 5) == sorted(
        ["1:0", f"{name:016x}", "device", *copies]
        for name, copies in (
            (forgotten, ("0", str(node.engine.cached_blocks()[forgotten].copies))),
            (changed, ("0", str(node.engine.cached_blocks()[changed].copies))),
            (invented, (str(node.engine.cached_blocks()[changed].copies), "0")),
        )
    ), output
    status, output = await command(rig, one, "resync", "--rank", "1")
    assert status == 0, output
    assert (await command(rig, one, "verify"))[0] == 0
    await rig.agree(one)


async def test_what_cannot_be_done_says_why(rig: Rig) -> None:
    await rig.start_nodes(1)
    one = await rig.indexer("one")
    await rig.agree(one)
    for arguments, expected, words in (
        (("status", "faults/nothing"), 1, "nothing"),
        (("verify", "pool"), 2, "namespace/component"),
        (("resync", "--rank", "first"), 2, "expected WORKER_ID"),
        (("resync", "--rank", "77"), 1, "out of reach: 1"),
        (("verify", "--rank", "77"), 1, "no answer"),
    ):
        status, output = await command(rig, one, *arguments)
        assert (status, words in output) == (expected, True), output
