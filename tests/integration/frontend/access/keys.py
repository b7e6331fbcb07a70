"""API keys of a test, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from kvrouter.frontend.access.key_file import KeyEntry, KeyFile, TenantEntry, new_key, write_key_file


class Keys:
    """Keys by id, and the file with their hashes. ``write`` after every change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tenants: list[TenantEntry] = []
        self._entries: dict[str, KeyEntry] = {}
        self._keys: dict[str, str] = {}

    def __getitem__(self, key_id: str) -> str:
        """Returns a key as its client has it."""
        return self._keys[key_id]

    @property
    def secrets(self) -> list[str]:
        """The secret parts of all keys."""
        return [key.partition(".")[2] for key in self._keys.values()]

    def add(self, key_id: str, **fields: Any) -> str:
        key, hashed = new_key(key_id)
        self._keys[key_id] = key
        self._entries[key_id] = msgspec.convert({"id": key_id, "hash": hashed, **fields}, KeyEntry)
        return key

    def change(self, key_id: str, **fields: Any) -> None:
        self._entries[key_id] = msgspec.structs.replace(self._entries[key_id], **fields)

    def write(self) -> None:
        write_key_file(self.path, KeyFile(list(self._entries.values()), self.tenants))
