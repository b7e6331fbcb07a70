"""API keys of a test, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from kvrouter.frontend.access.cache_salts import CacheSalts, create_salt_key
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

    @property
    def salt_key(self) -> Path:
        """File with the key of the salts of caches, which is created on first use."""
        path = self.path.with_name("cache-salt.key")
        if not path.exists():
            create_salt_key(path)
        return path

    @property
    def salts(self) -> CacheSalts:
        """Computes the salts that engines get."""
        return CacheSalts.of_file(self.salt_key)

    def options(self) -> dict[str, str]:
        """Returns the options of a Frontend with these keys."""
        return {"api_keys": str(self.path), "cache_salt_key_file": str(self.salt_key)}

    def write(self) -> None:
        write_key_file(self.path, KeyFile(list(self._entries.values()), self.tenants))
