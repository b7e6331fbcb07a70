from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.indexer.replica import replica
from kvrouter.indexer.replica.component import Limits
from kvrouter.indexer.replica.replica import Replica
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import AppliedRecord, ComponentDescriptor

COMPONENT = ComponentName("ns", "decode")


class Index:
    """Stands where it was restored to, and reads nothing."""

    sequence = 3
    looks = 0

    def __init__(self, _name: ComponentName, descriptor: ComponentDescriptor, *_rest: object) -> None:
        self.descriptor = descriptor

    @property
    def applied_record(self) -> AppliedRecord:
        Index.looks += 1
        return AppliedRecord(stream="s", stream_sequence=self.sequence)

    def update_workers(self, *_workers: object) -> None:
        pass

    async def run(self) -> None:
        await asyncio.Event().wait()


class Keys:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, key: str, value: bytes) -> None:
        self.held[key] = value

    def delete(self, key: str) -> None:
        self.held.pop(key, None)

    async def until(self, count: int) -> None:
        while len(self.held) != count:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[asyncio.Queue[dict[ComponentName, ComponentView]], Keys]]:
    """Yields where to put a replica's components, and its keys."""
    monkeypatch.setattr(replica, "ComponentIndex", Index)
    monkeypatch.setattr(replica, "DurableConsumer", lambda *_: None)
    monkeypatch.setattr(replica, "_LOOK_SECONDS", 0.001)
    views: asyncio.Queue[dict[ComponentName, ComponentView]] = asyncio.Queue()
    keys: Any = Keys()

    async def changes() -> AsyncIterator[SimpleNamespace]:
        while True:
            yield SimpleNamespace(components=await views.get())

    async def connect() -> Any:
        return None

    directory: Any = SimpleNamespace(changes=changes, ignored={}, tls=None)
    running = asyncio.create_task(Replica("one", directory, connect, keys, Limits()).run())
    try:
        async with asyncio.timeout(10):
            yield views, keys
    finally:
        running.cancel()
        await asyncio.wait({running})


THERE = {COMPONENT: ComponentView(COMPONENT, ComponentDescriptor(block_size=4))}


async def test_a_component_that_comes_back_is_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others must not purge what this replica has not applied, so they must see how far it is."""
    async with running_replica(monkeypatch) as (views, keys):
        for seen in (THERE, {}, THERE):
            views.put_nowait(seen)
            await keys.until(len(seen))


async def test_progress_is_recorded_together_with_later_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(replica, "time", SimpleNamespace(monotonic=lambda: now, thread_time=time.thread_time))
    written: list[int] = []
    async with running_replica(monkeypatch) as (views, keys):
        monkeypatch.setattr(
            keys, "put", lambda _, value: written.append(AppliedRecord.FromString(value).stream_sequence)
        )
        views.put_nowait(THERE)
        for sequence in (3, 4, 5):
            monkeypatch.setattr(Index, "sequence", sequence)
            looks = Index.looks
            while Index.looks < looks + 2:
                await asyncio.sleep(0.001)
            now += replica._RECORD_SECONDS / 2
    assert written == [3, 5]
