"""JetStream without disk space: the index follows its workers all the same, and goes on when space returns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from kvrouter.net.nats.event_stream import stream_config, write_error
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.indexer_pb2 import ComponentStats, GetStatsRequest, VerifyRequest, VerifyResponse

from . import full_disk
from .full_disk import NatsOnSmallDisk
from .processes import Processes, start_system, streamed, system
from .rig import COMPONENT, FULL, PATIENCE_SECONDS, TAKEN, IndexerProcess, Rig

DISK_BYTES = 16 << 20
MAX_BYTES = 9 << 20
"""Of the stream: a limit that an operator has set."""

pytestmark = pytest.mark.skipif(bool(full_disk.unavailable()), reason=full_disk.unavailable())


@pytest.fixture
def nats_server(tmp_path: Path) -> NatsOnSmallDisk:
    return NatsOnSmallDisk(tmp_path / "nats", DISK_BYTES)


async def test_the_index_follows_its_workers_while_the_disk_is_full(rig: Rig, nats_server: NatsOnSmallDisk) -> None:
    nodes = await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    nats_server.fill()
    await rig.serve(30)
    await rig.agree(one)
    await rig.until(lambda: all(node.worker.rank(0).stats().waiting_seconds for node in nodes))
    await rig.serve(10)
    await rig.agree(one)


async def test_the_stream_takes_messages_again_when_the_disk_has_space(rig: Rig, nats_server: NatsOnSmallDisk) -> None:
    nodes = await rig.start_nodes(1, 2)
    one = await rig.indexer("one")
    await rig.serve(10)
    await rig.agree(one)
    js = (await rig.client()).jetstream()
    await js.update_stream(stream_config(COMPONENT, max_bytes=MAX_BYTES))
    for _ in range(3 if FULL else 1):
        nats_server.fill()
        await rig.serve(30)
        await rig.until(lambda: all("takes no messages" in n.worker.rank(0).stats().waiting_reason for n in nodes))
        await rig.until(lambda: silent(one, True))
        nats_server.free()
        await rig.until(lambda: silent(one, False))
        await rig.until(lambda: not any(node.worker.rank(0).stats().waiting_seconds for node in nodes))
        await rig.serve(10)
        await rig.agree(one)
    assert not await write_error(js, COMPONENT.stream)
    assert (await js.stream_info(COMPONENT.stream)).config.max_bytes == MAX_BYTES, "the operator's limit stays"
    assert "stream.stopped" in one.log()
    await rig.until(lambda: _has_stream(one))


@pytest.mark.full
async def test_snapshots_are_taken_again_when_the_disk_has_space(rig: Rig, nats_server: NatsOnSmallDisk) -> None:
    await rig.start_nodes(1, 2)
    one = await rig.indexer("one", snapshot_threshold=20)
    await rig.serve(30, 0.01)
    await rig.until(lambda: TAKEN in one.log())
    nats_server.fill()
    await rig.serve(30, 0.01)
    await rig.agree(one)
    taken = one.log().count(TAKEN)
    nats_server.free()

    async def more() -> bool:
        await rig.serve(10, 0.01)
        return one.log().count(TAKEN) > taken + 1

    await rig.until(more)
    await rig.agree(one)
    late = await rig.indexer("late")
    await rig.agree(one, late)
    assert '"event": "snapshot.restored"' in late.log()


async def silent(process: IndexerProcess, wanted: bool) -> bool:
    """Whether an Indexer says of every rank that its heartbeats are missing, or of none."""
    ranks = (await process.stats()).ranks
    return bool(ranks) and all(rank.silent == wanted for rank in ranks)


async def _has_stream(process: IndexerProcess) -> bool:
    return not (await process.stats()).stream_error


@pytest.fixture
async def small_disk(nats_server: NatsOnSmallDisk, etcd_endpoint: str, namespace: str) -> AsyncIterator[Processes]:
    """Services as processes on a NATS with a small disk."""
    await nats_server.start()
    try:
        async with system(nats_server.url, etcd_endpoint, namespace) as found:
            yield found
    finally:
        await nats_server.kill()


async def statistics(processes: Processes) -> ComponentStats:
    """What the Indexer says of the component."""
    answer = await processes.indexer("indexer-0").get_stats(GetStatsRequest(), deadline=Deadline.after(10))
    return answer.components[0]


async def until(processes: Processes, condition: Callable[[ComponentStats], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition(await statistics(processes)):
            await asyncio.sleep(0.1)


async def agree(processes: Processes) -> None:
    """Waits until the index holds exactly what both idle workers hold, then lets their own state judge it."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            request = VerifyRequest(component=(await statistics(processes)).component)
            answers = processes.indexer("indexer-0").verify(request, deadline=Deadline.after(30))
            found = [answer async for answer in answers]
            if len(found) == 2 and all(same(answer) for answer in found):
                return


def same(answer: VerifyResponse) -> bool:
    differing = answer.missing_blocks + answer.surplus_blocks
    return answer.compared and bool(answer.common_blocks) and not differing


@pytest.mark.full
async def test_clients_see_nothing_of_a_full_disk(small_disk: Processes, nats_server: NatsOnSmallDisk) -> None:
    await small_disk.start("indexer", "indexer-0", "--snapshot-check-seconds", "0.2")
    await start_system(
        small_disk, schedulers=1, frontends=1, clock_factor=1, mode="kv", engine=("--heartbeat-seconds", "0.5")
    )
    await small_disk.ready("indexer", "indexer-0")
    frontend = small_disk.frontend("frontend-0")
    number = 0

    async def serve(count: int) -> None:
        nonlocal number
        numbers = range(number, number + count)
        number += count
        assert await asyncio.gather(*(streamed(frontend, n, 8) for n in numbers)) == [8] * count

    await serve(20)
    await agree(small_disk)
    nats_server.fill()
    await serve(60)
    await agree(small_disk)
    await small_disk.until_booked("scheduler-0", 0)
    assert (await statistics(small_disk)).ranks[0].verified
    nats_server.free()
    await serve(60)
    await until(small_disk, lambda known: not any(rank.silent for rank in known.ranks))
    await serve(20)
    await agree(small_disk)
    await small_disk.until_booked("scheduler-0", 0)
    status = await small_disk.status("scheduler-0")
    assert all(rank.active_blocks == rank.prefill_tokens == 0 for rank in status.components[0].ranks)
