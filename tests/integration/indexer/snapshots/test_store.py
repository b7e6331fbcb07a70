"""What snapshots leave in NATS: two objects, however many were taken, dropped or abandoned."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from kvrouter.indexer.snapshots.coordinator import Snapshots
from kvrouter.net.snapshot_format import InvalidSnapshot
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client

from ....faults.failpoints import intercepted
from ....waiting import until
from ..indexing import indexing
from .test_snapshots import fill, home, more, pointer_of

MESSAGES_OF_TWO = 4
"""A small snapshot is one piece and one message that describes it."""
STEPS = ("read", "put", "uploaded", "pointed", "cleaned", "purged")


async def messages(connection: Client, component: ComponentName) -> int:
    """Messages in the object store's stream."""
    info = await connection.jetstream().stream_info(f"OBJ_{component.snapshot_bucket}")
    return info.state.messages


async def test_dropped_snapshots_leave_nothing(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    sources = await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        for n in range(10):
            await more(connection, sources, 5 + n, 6 + n)
            await index.snapshots.take(index.position)
        assert await messages(connection, component) == MESSAGES_OF_TWO
        await both_can_be_read(index.snapshots, etcd_endpoint, component)
        assert await index.reset(even_if_others_live=False) != (0, 0)
        assert await messages(connection, component) == 0


@pytest.mark.parametrize("step", STEPS)
async def test_snapshots_abandoned_at_a_step_do_not_add_up(
    connection: Client, component: ComponentName, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail() -> None:
        raise TimeoutError(step)

    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        taken = index.snapshots
        assert taken
        for _ in range(2):
            await taken.take(index.position)
        with monkeypatch.context() as patched:
            patched.setattr(*intercepted(step, fail))
            for _ in range(6):
                with pytest.raises(TimeoutError):
                    await taken.take(index.position)
                assert await messages(connection, component) <= MESSAGES_OF_TWO + 2
        await taken.take(index.position)
        assert await messages(connection, component) == MESSAGES_OF_TWO
        await both_can_be_read(taken, etcd_endpoint, component)


async def test_pieces_of_an_object_that_was_never_finished_are_removed(
    connection: Client, component: ComponentName, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        taken = index.snapshots
        assert taken
        publish = taken._js.publish

        async def publish_pieces(subject: str, *args: Any, **kwargs: Any) -> object:
            if ".M." in subject:
                raise asyncio.CancelledError
            return await publish(subject, *args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(taken._js, "publish", publish_pieces)
            for _ in range(5):
                with pytest.raises(asyncio.CancelledError):
                    await taken.take(index.position)
        assert await messages(connection, component) == 1, "the last one alone"
        await taken.take(index.position)
        assert await messages(connection, component) == MESSAGES_OF_TWO // 2


async def test_objects_after_the_bound_are_not_swept(
    connection: Client, component: ComponentName, etcd_endpoint: str
) -> None:
    await fill(connection, component)
    async with indexing(connection, component, home=home(etcd_endpoint)) as index:
        await until(lambda: index.ready)
        assert index.snapshots
        store = index.snapshots._store
        await store.put("early", deque([b"1"]))
        bound = await store.last_sequence()
        await store.put("late", deque([b"2"]))
        await store.sweep((), bound)
        assert await store.get("late") == b"2"
        with pytest.raises(InvalidSnapshot, match="gone"):
            await store.get("early")


async def both_can_be_read(taken: Snapshots, etcd: str, component: ComponentName) -> None:
    pointer = (await pointer_of(etcd, component)).value
    for ref in (pointer.current, pointer.previous):
        assert len(await taken._store.get(ref.object_name)) == ref.bytes
