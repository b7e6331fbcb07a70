"""With the NATS account of one worker, nothing of another party can be read, forged or removed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
import pytest
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.servers import NatsServer
from kvrouter.net.nats.event_stream import ensure_stream
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from .test_accounts import OTHER, POOL, WORKER, connected, settled

SNAPSHOTS = f"OBJ_{POOL.snapshot_bucket}"
OWN = POOL.events_subject(1, 0)
FOREIGN = [
    *(POOL.events_subject(2, 0), POOL.live_subject(2, 0), POOL.load_subject(2, 0), POOL.sync_subject),
    *(POOL.sync_state_subject("scheduler-0"), f"$O.{POOL.snapshot_bucket}.M.c25hcHNob3Q=", "_INBOX_indexer.x"),
    *("_INBOX_scheduler.x", f"_INBOX_{OTHER}.x", "_R_.x", "$SYS.REQ.SERVER.PING"),
]
"""Subjects of other parties."""


def streams() -> Iterator[str]:
    yield from (POOL.stream, SNAPSHOTS, "attacker", f"KV_{POOL.name}")


def hostile_configs(name: str) -> Iterator[dict[str, Any]]:
    """Configurations with which a stream would read, forge or remove what belongs to others."""
    base: dict[str, Any] = {"name": name, "subjects": [OWN], "storage": "file"}
    yield base
    for subject in (">", "kvrouter.>", "_INBOX.>", POOL.events_wildcard, POOL.load_wildcard, POOL.sync_subject):
        yield base | {"subjects": [subject]}
    for stream in (POOL.stream, SNAPSHOTS):
        without = {key: value for key, value in base.items() if key != "subjects"}
        yield without | {"mirror": {"name": stream}}
        yield without | {"sources": [{"name": stream}]}
        transform = [{"src": ">", "dest": POOL.load_subject(2, 0)}]
        yield without | {"sources": [{"name": stream, "subject_transforms": transform}]}
    for destination in (POOL.load_subject(2, 0), POOL.sync_subject, f"$JS.API.STREAM.PURGE.{POOL.stream}"):
        yield base | {"republish": {"src": ">", "dest": destination}}
        yield base | {"subject_transform": {"src": ">", "dest": destination}}
    yield base | {"allow_rollup_hdrs": True, "subjects": [f"$O.{POOL.snapshot_bucket}.>"]}
    yield base | {"allow_msg_schedules": True}


def requests() -> Iterator[tuple[str, bytes]]:
    """Every operation of the JetStream API on every stream: subject and body."""
    yield from ((f"$JS.API.{each}", b"") for each in ("INFO", "STREAM.NAMES", "STREAM.LIST", "ACCOUNT.INFO"))
    consumer = {"durable_name": "c", "deliver_subject": f"_INBOX_{WORKER}.x", "ack_policy": "none"}
    for stream in streams():
        for config in hostile_configs(stream):
            for verb in ("CREATE", "UPDATE"):
                yield f"$JS.API.STREAM.{verb}.{stream}", json.dumps(config).encode()
        create = json.dumps({"stream_name": stream, "config": consumer}).encode()
        filtered = {"stream_name": stream, "config": consumer | {"filter_subject": OWN}}
        yield from (
            *((f"$JS.API.STREAM.{verb}.{stream}", b"") for verb in ("INFO", "DELETE", "PURGE", "SNAPSHOT", "RESTORE")),
            *((f"$JS.API.STREAM.{verb}.{stream}", b"{}") for verb in ("PEER.REMOVE", "LEADER.STEPDOWN")),
            (f"$JS.API.STREAM.MSG.GET.{stream}", b'{"seq": 1}'),
            (f"$JS.API.STREAM.MSG.DELETE.{stream}", b'{"seq": 1}'),
            (f"$JS.API.DIRECT.GET.{stream}", b'{"seq": 1}'),
            (f"$JS.API.DIRECT.GET.{stream}.{POOL.events_subject(2, 0)}", b""),
            (f"$JS.API.CONSUMER.CREATE.{stream}", create),
            (f"$JS.API.CONSUMER.CREATE.{stream}.c", create),
            (f"$JS.API.CONSUMER.CREATE.{stream}.c.{OWN}", json.dumps(filtered).encode()),
            (f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.c", create),
            *((f"$JS.API.CONSUMER.{verb}.{stream}", b"") for verb in ("NAMES", "LIST")),
            *((f"$JS.API.CONSUMER.{verb}.{stream}.indexer-a", b"") for verb in ("INFO", "DELETE", "PAUSE", "UNPIN")),
            (f"$JS.API.CONSUMER.MSG.NEXT.{stream}.indexer-a", b"1"),
            (f"$JS.ACK.{stream}.indexer-a.1.1.1.1.0", b"+TERM"),
            (f"$JS.FC.{stream}.indexer-a.x", b""),
        )
    yield f"$O.{POOL.snapshot_bucket}.C.x", b"chunk"
    yield from ((subject, b"forged") for subject in FOREIGN)


async def contents(js: JetStreamContext) -> dict[str, Any]:
    """What is stored: the configuration, the subjects and the consumers of every stream."""
    found: dict[str, Any] = {}
    for info in await js.streams_info():
        name = info.config.name
        assert name is not None
        state = (await js.stream_info(name, subjects_filter=">")).state
        others = {subject: count for subject, count in (state.subjects or {}).items() if subject != OWN}
        found[name] = info.config.subjects, info.config.republish, state.first_seq, others, state.consumer_count
    return found


@asynccontextmanager
async def watched(credentials: Credentials, server: NatsServer) -> AsyncIterator[tuple[JetStreamContext, list[str]]]:
    """The streams as an administrator sees them, and the subjects of others on which messages appear."""
    seen: list[str] = []

    async def note(message: Any) -> None:
        seen.append(message.subject)

    async with connected(credentials.nats_access("admin", server.url)) as (admin, _):
        for subject in FOREIGN:
            await admin.subscribe(subject, cb=note)
        await settled(admin)
        yield admin.jetstream(timeout=10), seen


@pytest.fixture
async def filled_nats(credentials: Credentials, secure_nats: NatsServer) -> NatsServer:
    """Streams with messages of another worker and of an Indexer."""
    async with connected(credentials.nats_access("indexer", secure_nats.url)) as (indexer, _):
        js = indexer.jetstream(timeout=10)
        await ensure_stream(js, POOL)
        try:
            store = await js.object_store(POOL.snapshot_bucket)
        except NotFoundError:
            store = await js.create_object_store(POOL.snapshot_bucket)
        await store.put("snapshot", b"of the Indexer")
        await js.pull_subscribe(POOL.events_wildcard, durable="indexer-a", stream=POOL.stream)
    async with connected(credentials.nats_access(OTHER, secure_nats.url)) as (other, _):
        await other.jetstream(timeout=10).publish(POOL.events_subject(2, 0), b"honest", stream=POOL.stream)
    return secure_nats


async def test_no_operation_of_jetstream_is_allowed(credentials: Credentials, filled_nats: NatsServer) -> None:
    async with watched(credentials, filled_nats) as (js, seen):
        before = await contents(js)
        async with connected(credentials.nats_access(WORKER, filled_nats.url)) as (attacker, errors):
            answers = await attacker.subscribe(f"_INBOX_{WORKER}.x")
            tried = list(requests())
            assert len(tried) > 200
            for subject, body in tried:
                await attacker.publish(subject, body, reply=f"_INBOX_{WORKER}.x")
            await settled(attacker)
            assert len(errors) == len(tried)
            assert all("permissions violation for publish" in error for error in errors)
            with pytest.raises(nats.errors.TimeoutError):
                await answers.next_msg(timeout=0.1)
        assert await contents(js) == before
        assert seen == []


async def test_the_server_publishes_nothing_on_behalf_of_a_worker(
    credentials: Credentials, filled_nats: NatsServer
) -> None:
    """By an acknowledgement to a reply subject of others, or by a header that the server obeys."""
    async with watched(credentials, filled_nats) as (js, seen):
        before = await contents(js)
        async with connected(credentials.nats_access(WORKER, filled_nats.url)) as (attacker, _):
            for kind in (POOL.events_subject, POOL.live_subject, POOL.load_subject):
                for reply in (*FOREIGN, *(subject for subject, _ in requests())):
                    await attacker.publish(kind(1, 0), b"forged", reply=reply)
            for name, value in (
                *(("Nats-Rollup", scope) for scope in ("all", "sub")),
                *(("Nats-Trace-Dest", subject) for subject in FOREIGN),
                *(("Nats-Schedule-Target", subject) for subject in FOREIGN),
                *(("Nats-Marker-Reason", "Purge"), ("Nats-TTL", "1s"), ("Nats-Incr", "1"), ("Nats-Batch-Id", "b")),
            ):
                schedule = {"Nats-Schedule": "@at 2020-01-01T00:00:00Z"} if "Schedule" in name else {}
                await attacker.publish(OWN, b"forged", headers={name: value} | schedule)
            await settled(attacker)
            own = await attacker.jetstream(timeout=10).publish(OWN, b"last", stream=POOL.stream)
        # Once the last of its messages is stored, the earlier ones have been answered.
        assert (await js.stream_info(POOL.stream)).state.last_seq >= own.seq
        assert await contents(js) == before
        assert seen == []


async def test_no_subject_of_others_is_read(credentials: Credentials, filled_nats: NatsServer) -> None:
    wildcards = (">", "*.>", "kvrouter.>", "$JS.>", "$O.>", "$SYS.>", "_R_.>", "_INBOX.>", POOL.events_wildcard)
    subjects = [*FOREIGN, *wildcards]
    async with connected(credentials.nats_access(WORKER, filled_nats.url)) as (attacker, errors):
        for subject in subjects:
            await attacker.subscribe(subject)
            await attacker.subscribe(subject, queue="indexer-a")
        await settled(attacker)
        assert len(errors) == 2 * len(subjects)
