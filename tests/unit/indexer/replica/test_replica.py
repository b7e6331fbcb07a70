from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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

    applied_record = AppliedRecord(stream="s", stream_sequence=3)

    def __init__(self, _name: ComponentName, descriptor: ComponentDescriptor, *_rest: object) -> None:
        self.descriptor = descriptor

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


async def test_a_component_that_comes_back_is_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others must not purge what this replica has not applied, so they must see how far it is."""
    monkeypatch.setattr(replica, "ComponentIndex", Index)
    monkeypatch.setattr(replica, "DurableConsumer", lambda *_: None)
    monkeypatch.setattr(replica, "_RECORD_SECONDS", 0.001)
    views: asyncio.Queue[dict[ComponentName, ComponentView]] = asyncio.Queue()
    keys: Any = Keys()

    async def changes() -> AsyncIterator[SimpleNamespace]:
        while True:
            yield SimpleNamespace(components=await views.get())

    async def connect() -> Any:
        return None

    directory: Any = SimpleNamespace(changes=changes, ignored={}, tls=None)
    running = asyncio.create_task(Replica("one", directory, connect, keys, Limits()).run())
    there = {COMPONENT: ComponentView(COMPONENT, ComponentDescriptor(block_size=4))}
    async with asyncio.timeout(10):
        for seen in (there, {}, there):
            views.put_nowait(seen)
            await keys.until(len(seen))
    running.cancel()
    await asyncio.wait({running})
