"""Registrations inside of one process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kvrouter.net.local import LocalKeys, LocalRegistry


async def test_each_change_is_seen_with_all_entries() -> None:
    registry = LocalRegistry()
    registry.put("a", b"1")
    async with aclosing(registry.changes()) as changes:
        assert (await anext(changes)).entries == {"a": b"1"}
        registry.put("b", b"2")
        registry.delete("a")
        assert (await anext(changes)).entries == {"b": b"2"}, "two changes at once are one"


async def test_what_changes_nothing_wakes_nobody() -> None:
    registry = LocalRegistry()
    registry.put("a", b"1")
    async with aclosing(registry.changes()) as changes:
        await anext(changes)
        waiting = asyncio.ensure_future(anext(changes))
        registry.put("a", b"1")
        registry.delete("missing")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        registry.put("a", b"2")
        assert (await waiting).entries == {"a": b"2"}


async def test_an_owner_removes_its_own_keys_only() -> None:
    registry = LocalRegistry()
    one, two = LocalKeys(registry), LocalKeys(registry)
    one.put("a", b"1")
    two.put("b", b"2")
    two.delete("a")
    assert registry.get("a") == b"1"
    running = asyncio.create_task(one.run())
    one.stop()
    await running
    assert (registry.get("a"), registry.get("b")) == (None, b"2")
    assert not one.registered


async def test_the_keys_of_an_owner_go_when_it_is_cancelled() -> None:
    registry = LocalRegistry()
    keys = LocalKeys(registry)
    keys.put("a", b"1")
    assert keys.registered
    await keys.wait_registered()
    running = asyncio.create_task(keys.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running})
    assert not registry.has_any("a")
