"""Registrations of a system in one process, with the keys and values that etcd would have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol

from kvrouter.net.etcd import Snapshot


class LocalRegistry:
    """Keys and values. Everybody in the process sees each change at once."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}
        self._changed = asyncio.Event()

    def get(self, key: str) -> bytes | None:
        """Returns the value of a key; None if there is none."""
        return self._entries.get(key)

    def has_any(self, prefix: str) -> bool:
        """Returns whether a key begins with a prefix."""
        return any(key.startswith(prefix) for key in self._entries)

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of a key."""
        if self._entries.get(key) != value:
            self._entries[key] = value
            self._tell()

    def delete(self, key: str) -> None:
        """Removes a key, if it exists."""
        if self._entries.pop(key, None) is not None:
            self._tell()

    async def changes(self) -> AsyncGenerator[Snapshot]:
        """Yields all entries, at once and after each change, for ever. Changes in quick succession count as one."""
        while True:
            changed = self._changed
            yield Snapshot(dict(self._entries))
            await changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class KeyValues(Protocol):
    """Keys and values of several owners."""

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of a key."""

    def delete(self, key: str) -> None:
        """Removes a key, if it exists."""


class LocalKeys:
    """The keys of one owner in a registry. It has the methods of ``LeasedKeys``, without a lease of its own."""

    def __init__(self, registry: KeyValues) -> None:
        self._registry = registry
        self._owned: set[str] = set()
        self._stopped = asyncio.Event()

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of a key."""
        self._owned.add(key)
        self._registry.put(key, value)

    def delete(self, key: str) -> None:
        """Removes a key of this owner."""
        if key in self._owned:
            self._owned.discard(key)
            self._registry.delete(key)

    def stop(self) -> None:
        """Removes all keys of this owner, and lets ``run`` return."""
        for key in sorted(self._owned):
            self.delete(key)
        self._stopped.set()

    async def run(self) -> None:
        """Returns after ``stop``; removes the keys when it is cancelled."""
        try:
            await self._stopped.wait()
        finally:
            self.stop()

    @property
    def registered(self) -> bool:
        """Whether the keys are in the registry."""
        return bool(self._owned)

    @property
    def registrations(self) -> int:
        """How often the keys were written anew: once, since the registry loses none."""
        return int(self.registered)

    async def wait_registered(self) -> None:
        """Returns at once: each key is written when it is put."""
