"""Follows the files of API keys and of the key of salts: a change counts within a second, an unusable one never."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
from kvrouter.frontend.access.api_keys import ApiKeys
from kvrouter.frontend.access.cache_salts import CacheSalts
from kvrouter.frontend.access.key_file import KeyFile, KeyFileError, read_key_file
from kvrouter.net.secret_files import file_version
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(component="frontend")

_INTERVAL_SECONDS = 0.5


async def follow_salt_key(salts: CacheSalts, path: Path) -> None:
    """Follows the file with the key of the salts of caches, until cancelled."""
    async for _ in changes(path, file_version(path)):
        try:
            await asyncio.to_thread(salts.read, path)
        except KeyFileError as error:
            log.error("salt_key.rejected", cause=str(error))
        else:
            log.info("salt_key.loaded")


class FollowedKeys:
    """The API keys in force. Without a file there are none. ``run`` must be running."""

    def __init__(self, path: Path | None, registry: CollectorRegistry, *, can_isolate: bool = True) -> None:
        """Reads the file.

        Args:
            path: The file; None for none.
            registry: Registry for the metrics.
            can_isolate: Whether tenants may be isolated, since there is a key for the salts of their caches.

        Raises:
            KeyFileError: it cannot be used.
        """
        self._path = path
        self._can_isolate = can_isolate
        self._version = file_version(path or "")
        self._rejected = False
        self.keys = ApiKeys(KeyFile() if path is None else self._read(path))
        """The keys in force."""
        Gauge("kvrouter_frontend_api_keys", "API keys in force.", registry=registry).set_function(
            lambda: len(self.keys)
        )
        Gauge(
            "kvrouter_frontend_api_keys_rejected",
            "1 while the file of API keys cannot be used and the former keys stay in force, otherwise 0.",
            registry=registry,
        ).set_function(lambda: int(self._rejected))

    async def run(self) -> None:
        """Follows the file until cancelled."""
        if self._path is None:
            return
        async for _ in changes(self._path, self._version):
            try:
                content = await asyncio.to_thread(self._read, self._path)
                self.keys = ApiKeys(content)
            except KeyFileError as error:
                self._rejected = True
                log.error("keys.rejected", cause=str(error), keys=len(self.keys))
            else:
                self._rejected = False
                log.info("keys.loaded", keys=len(self.keys), tenants=len(content.tenants))

    def _read(self, path: Path) -> KeyFile:
        content = read_key_file(path)
        isolated = [tenant.name for tenant in content.tenants if tenant.isolated]
        if isolated and not self._can_isolate:
            raise KeyFileError(
                f"{path}: the tenant {isolated[0]!r} is isolated, which needs a key for the salts of caches: "
                "create one with `kvrouter keys create-salt-key`, and start all Frontends with --cache-salt-key-file"
            )
        return content


async def changes(path: Path, version: object) -> AsyncIterator[None]:
    """Yields after each change of a file since a version."""
    while True:
        await asyncio.sleep(_INTERVAL_SECONDS)
        # In a thread, because the file may be on a network.
        latest = await asyncio.to_thread(file_version, path)
        if latest != version:
            version = latest
            yield
