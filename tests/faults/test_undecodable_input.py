"""Random bytes in etcd and on NATS: no service ends, requests are answered, and a restart finds its way."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator

import pytest
from google.protobuf.message import Message
from kvrouter.net.etcd import connect
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BusyThresholds, Component
from kvrouter.v1.events_pb2 import KvEventBatch, LoadReport
from kvrouter.v1.indexer_pb2 import ComponentStats, GetStatsRequest
from kvrouter.v1.names import ComponentName, namespace_prefix, service_key, services_prefix, threshold_key
from kvrouter.v1.registry_pb2 import (
    AppliedRecord,
    BusyThresholdsRecord,
    ComponentDescriptor,
    IncarnationRecord,
    RankRegistration,
    ServiceRegistration,
    WorkerRegistration,
)
from kvrouter.v1.snapshot_pb2 import SnapshotPointer, SnapshotRef
from kvrouter.v1.sync_pb2 import ReplicaSyncEvent, SyncStateResponse

from ..raw_nats import raw_nats
from .processes import MODEL, PATIENCE_SECONDS, Processes, start_system, streamed
from .rig import FULL

LARGEST = (1 << 64) - 1
ROUNDS = 20 if FULL else 2
SYNC = ("--replica-sync", "--replica-heartbeat-seconds", "0.2")
INDEXER = ("--snapshot-threshold", "5", "--snapshot-check-seconds", "0.2", "--snapshot-lock-seconds", "2")


def prefixes(pool: ComponentName) -> Iterator[bytes]:
    """Every prefix that a service reads."""
    root = namespace_prefix(pool.namespace)
    for text in (
        root,
        *(services_prefix(pool.namespace, kind) for kind in ("indexer", "scheduler", "frontend")),
        f"{root}services/",
        f"{root}components/",
        pool.prefix,
        pool.workers_prefix,
        pool.applied_key("x")[:-1],
        pool.incarnation_key(1)[:-16],
        f"{root}thresholds/",
    ):
        yield text.encode()


def extremes(pool: ComponentName) -> Iterator[tuple[str, Message]]:
    """Entries that can be decoded and say what cannot be."""
    hostile = ServiceRegistration(ready=True, endpoint="\0 not an address")
    for kind in ("indexer", "scheduler", "frontend"):
        yield service_key(pool.namespace, kind, "hostile"), hostile
        yield service_key(pool.namespace, kind, "nowhere"), ServiceRegistration(ready=True)
        yield service_key(pool.namespace, kind, "named"), ServiceRegistration(ready=True, instance_id="other")
    ranks = [RankRegistration(dp_rank=1, total_blocks=LARGEST, incarnation=LARGEST)] * 2
    worker = WorkerRegistration(
        worker_id=9, model=MODEL, block_size=16, hash_scheme="xxh3-1337", endpoint="x:99999", ranks=ranks
    )
    yield pool.worker_key(9), worker
    for count in (1, 2):
        one = WorkerRegistration(worker_id=10 + count, role=77, transport=88)  # type: ignore[arg-type]
        one.MergeFrom(WorkerRegistration(model=MODEL, block_size=16, hash_scheme="xxh3-1337", ranks=ranks[:count]))
        yield pool.worker_key(10 + count), one
    other = ComponentName(pool.namespace, "other")
    yield other.descriptor_key, ComponentDescriptor(model=MODEL)
    misnamed = ComponentDescriptor(model=MODEL, block_size=16, component=Component(namespace="a", name="b"))
    yield ComponentName(pool.namespace, "misnamed").descriptor_key, misnamed
    yield (
        threshold_key(pool.namespace, "other"),
        BusyThresholdsRecord(
            thresholds=BusyThresholds(
                active_decode_blocks_threshold=float("nan"), active_prefill_tokens_threshold=LARGEST
            )
        ),
    )
    yield pool.incarnation_key(77), IncarnationRecord(incarnation=LARGEST)
    yield pool.applied_key("gone"), AppliedRecord(stream="\0", stream_sequence=LARGEST)


def own_keys(pool: ComponentName) -> Iterator[str]:
    """Keys that the system itself has written."""
    for name, kind in named(0).items():
        yield service_key(pool.namespace, kind, name)
    for worker_id in (1, 2):
        yield pool.worker_key(worker_id)
        yield pool.incarnation_key(worker_id)
    yield from (pool.descriptor_key, pool.snapshot_key, pool.snapshot_lock_key, pool.applied_key("indexer-0"))
    yield threshold_key(pool.namespace, MODEL)


def subjects(pool: ComponentName, rng: random.Random) -> Iterator[bytes]:
    """Every subject that a service subscribes to, wildcards filled in with a rank and with random bytes."""
    for wildcard in (pool.events_wildcard, pool.live_wildcard, pool.load_wildcard):
        stem = wildcard.removesuffix(">").encode()
        yield stem + b"0000000000000001.0"
        yield stem + b"0000000000000001.4294967295"
        yield stem + token(rng)
        yield stem + token(rng) + b".0000000000000001.0"
    yield pool.sync_subject.encode()
    for name in ("scheduler-0", "scheduler-3"):
        yield pool.sync_state_subject(name).encode()
    yield f"$O.{pool.snapshot_bucket}.M.".encode() + token(rng)
    yield f"$O.{pool.snapshot_bucket}.M.bm90LW1ldGFkYXRh".encode()


def token(rng: random.Random) -> bytes:
    """Bytes that may stand in a subject: no white space, no wildcard, no empty part."""
    return bytes(byte for byte in rng.randbytes(20) if byte > 32 and byte not in b".*>\x7f") + b"\xff"


def payloads(pool: ComponentName, rng: random.Random) -> Iterator[bytes]:
    yield b""
    yield rng.randbytes(rng.randrange(1, 200))
    yield b'{"name": 1, "deleted": "x", "chunks": "many", "nuid": 7}'
    batch = KvEventBatch(worker_id=1, block_size=16).SerializeToString()
    for message in (batch, LoadReport(active_blocks=LARGEST, prefill_tokens=LARGEST).SerializeToString()):
        yield message
        yield bytes(byte ^ (rng.random() < 0.1) * rng.randrange(256) for byte in message)
    component = Component(namespace=pool.namespace, name=pool.name)
    event = ReplicaSyncEvent(scheduler_id="scheduler-1", incarnation=1, sequence=LARGEST, component=component)
    event.add_request.booking.request_id = "x"
    event.add_request.sequence_hashes = b"\xff" * 24
    yield event.SerializeToString()
    yield SyncStateResponse(scheduler_id="scheduler-0", chunk=LARGEST >> 32, last=True).SerializeToString()


HEADERS = (
    None,
    b"NATS/1.0\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 404 \xff No Messages\r\n\r\n",
    b"NATS/1.0 409 Consumer Deleted\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    b"NATS/1.0\r\n\xff\xfe: \xfd\r\nx\r\n\r\n",
    b"\xff",
)


async def write_to_etcd(endpoint: str, pool: ComponentName, rng: random.Random, *, overwrite: bool) -> None:
    async with connect(endpoint) as client:
        for prefix in prefixes(pool):
            for _ in range(3):
                await client.put(prefix + rng.randbytes(rng.randrange(1, 30)), rng.randbytes(rng.randrange(40)))
            await client.put(prefix + b"\xff/\xfe/descriptor", b"\xff")
            await client.put(prefix + b"x\xff", b"")
        for key, message in extremes(pool):
            await client.put(key.encode(), message.SerializeToString())
        pointer = SnapshotPointer(current=SnapshotRef(object_name="\x01/none", stream_sequence=LARGEST))
        for key in own_keys(pool) if overwrite else ():
            await client.put(
                key.encode(), rng.choice([b"", b"\xff" * 9, rng.randbytes(30), pointer.SerializeToString()])
            )


async def publish(url: str, pool: ComponentName, rng: random.Random) -> None:
    async with raw_nats(url) as raw:
        inboxes = await raw.inboxes(5)
        for subject in (*subjects(pool, rng), *inboxes):
            for payload in payloads(pool, rng):
                raw.publish(subject, payload, rng.choice(HEADERS), rng.choice([b"", b"\xff", b"$JS.ACK.a.b.c.d.e.f.g"]))
        await raw.flush()


def named(generation: int) -> dict[str, str]:
    """Kind by id, of the services of one generation: a killed one's registration stays until its lease ends."""
    first = 2 * generation
    ids = [("indexer", first), ("scheduler", first), ("scheduler", first + 1), ("frontend", first)]
    return {f"{kind}-{number}": kind for kind, number in ids}


async def all_serve(processes: Processes, pool: ComponentName, generation: int, number: int) -> None:
    """Every service is alive and ready, requests are answered, and the index follows the stream."""
    frontend = f"frontend-{2 * generation}"
    for name, kind in named(generation).items():
        await processes.ready(kind, name)
        assert processes.running[name].returncode is None, name
    before = await stats(processes, pool, generation)
    for each in range(number, number + 5):
        assert await streamed(processes.frontend(frontend), each, 4) == 4
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            after = await stats(processes, pool, generation)
            if after.applied_stream_sequence == after.last_stream_sequence > before.last_stream_sequence:
                return
            await asyncio.sleep(0.05)


async def stats(processes: Processes, pool: ComponentName, generation: int) -> ComponentStats:
    # The stub of `ready` stays valid while the registration in etcd is overwritten.
    named_ = Component(namespace=pool.namespace, name=pool.name)
    indexer = processes.indexer(f"indexer-{2 * generation}")
    answer = await indexer.get_stats(GetStatsRequest(component=named_), deadline=Deadline.after(10))
    return answer.components[0]


@pytest.mark.full
async def test_random_bytes_in_etcd_and_on_nats_stop_no_service(
    processes: Processes, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    seed = int(os.environ.get("KVROUTER_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"KVROUTER_SEED={seed}")  # noqa: T201 - pytest shows it where a test fails
    rng = random.Random(seed)
    pool = ComponentName(namespace, "workers")
    await processes.start("indexer", "indexer-0", *INDEXER)
    await start_system(processes, schedulers=2, frontends=1, clock_factor=5, mode="kv", scheduler=SYNC)
    await all_serve(processes, pool, 0, 0)
    for round_ in range(ROUNDS):
        await write_to_etcd(etcd_endpoint, pool, rng, overwrite=True)
        await publish(nats_url, pool, rng)
        await all_serve(processes, pool, 0, 10 * round_ + 10)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not 0 < (await stats(processes, pool, 0)).snapshot_sequence < LARGEST:
            await asyncio.sleep(0.05)
    for name in named(0):
        await processes.kill(name)
    await write_to_etcd(etcd_endpoint, pool, rng, overwrite=False)
    options = {"indexer": INDEXER, "scheduler": SYNC, "frontend": ("--port", "0")}
    for name, kind in named(1).items():
        await processes.start(kind, name, *options[kind])
    await all_serve(processes, pool, 1, 1000)
    await publish(nats_url, pool, rng)
    await all_serve(processes, pool, 1, 2000)
    for name, kind in named(1).items():
        if kind == "scheduler":
            await processes.until_booked(name, 0)
