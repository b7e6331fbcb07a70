"""Addresses of engines as a gateway needs them: the endpoint picker protocol has IP addresses and ports, no names.

Names in the registered URLs are resolved in the background. The first IPv4 address counts, or else the first IPv6
address. If a name cannot be resolved any more, its last address stays.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import structlog
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.v1.registry_pb2 import WorkerRegistration

log = structlog.get_logger(component="endpoint-picker")

_SCAN_SECONDS = 0.1
"""Interval in which new names are looked for."""
_RESOLVE_SECONDS = 5.0
"""Interval in which each name is resolved again."""


class _Server(NamedTuple):
    host: str
    """Name or IP address; empty for no server."""
    port: int
    is_name: bool


class EngineAddresses:
    """The addresses of all registered engines."""

    def __init__(self, directory: Directory, resolve: Callable[[str], Awaitable[str]] | None = None) -> None:
        """``resolve`` returns the address of a name, and raises OSError if it has none; None asks the system."""
        self._directory = directory
        self._resolve = resolve or _first_address
        self._resolved: dict[str, str] = {}
        self._due: dict[str, float] = {}
        """When each name is resolved next, seconds of the monotonic clock."""

    def of(self, worker: WorkerRegistration) -> str:
        """Returns the address of a worker's OpenAI API, IP:port; empty if it has none or its name is unresolved."""
        host, port, is_name = _server(worker.openai_endpoint)
        if is_name:
            host = self._resolved.get(host, "")
        if not host:
            return ""
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def run(self) -> None:
        """Resolves names until it is cancelled."""
        while True:
            await self.resolve_due()
            await asyncio.sleep(_SCAN_SECONDS)

    async def resolve_due(self) -> None:
        """Resolves names that are new, or were resolved a while ago, and forgets those of engines that have gone."""
        names = {
            server.host
            for view in self._directory.components.values()
            for worker in view.workers.values()
            if (server := _server(worker.openai_endpoint)).is_name
        }
        for known in (self._resolved, self._due):
            for gone in known.keys() - names:
                del known[gone]
        now = time.monotonic()
        due = [name for name in names if self._due.get(name, 0.0) <= now]
        async with asyncio.TaskGroup() as group:
            for name in due:
                group.create_task(self._resolve_one(name))

    async def _resolve_one(self, name: str) -> None:
        is_new = name not in self._due
        try:
            self._resolved[name] = await self._resolve(name)
        except OSError as error:
            if is_new or name in self._resolved:
                log.warning("engine.unresolved", name=name, last_address=self._resolved.get(name, ""), cause=str(error))
        self._due[name] = time.monotonic() + _RESOLVE_SECONDS


@lru_cache(4096)
def _server(url: str) -> _Server:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        ip_address(host)
    except ValueError:
        return _Server(host, port, is_name=bool(host))
    return _Server(host, port, is_name=False)


async def _first_address(name: str) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])
