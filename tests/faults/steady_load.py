"""Streams that begin and end all the time, each counted with what its client saw."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvrouter.runtime.contracts import Frontend
from kvrouter.v1.errors import KvRouterError

from .processes import streamed

TOKENS = 8


@dataclass
class Outcomes:
    """What clients saw so far: ``OK``, or the code and message of an error."""

    seen: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> int:
        return self.seen.total()

    @property
    def failed(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.seen.items() if outcome != "OK"}


@asynccontextmanager
async def steady_load(frontend: Frontend, clients: int = 8) -> AsyncIterator[Outcomes]:
    """Requests of so many clients, one after the other, while the context lasts; those under way then end."""
    outcomes = Outcomes()
    numbers = itertools.count(1)
    stopping = asyncio.Event()

    async def client() -> None:
        while not stopping.is_set():
            try:
                tokens = await streamed(frontend, next(numbers) % 64, TOKENS)
                outcomes.seen["OK" if tokens == TOKENS else f"{tokens} of {TOKENS} tokens"] += 1
            except KvRouterError as error:
                outcomes.seen[f"{error.code.name}: {error.message}"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
        try:
            yield outcomes
        finally:
            stopping.set()
