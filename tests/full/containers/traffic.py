"""Requests to the Frontend of a compose project."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp

SECONDS = 60


class Client:
    """Sends completions, one at a time or all the time."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = f"{url}/v1/completions"
        self.numbers = itertools.count()

    def stream(self, **fields: Any) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self.session.post(self.url, json={**self.body(), "stream": True, **fields})

    def body(self) -> dict[str, Any]:
        """Returns a request whose prompt nobody sent before."""
        return {"model": "mock-model", "prompt": [next(self.numbers), *range(64)], "max_tokens": 8}

    async def status(self) -> int:
        """Sends a request; returns the status, or 0 without a whole response."""
        try:
            async with self.session.post(self.url, json=self.body()) as response:
                await response.read()
                return response.status
        except aiohttp.ClientError:
            return 0

    async def served(self) -> None:
        """Waits until a request is answered."""
        async with asyncio.timeout(SECONDS):
            while await self.status() != 200:
                await asyncio.sleep(0.2)

    @asynccontextmanager
    async def load(self, callers: int) -> AsyncIterator[Counter[int]]:
        """Has this many requests run at any time; yields how many ended with which status so far."""
        seen: Counter[int] = Counter()

        async def call() -> None:
            while True:
                seen[await self.status()] += 1
                await asyncio.sleep(0.05)  # so that refused requests do not take the processor

        calling = [asyncio.create_task(call()) for _ in range(callers)]
        try:
            yield seen
        finally:
            for each in calling:
                each.cancel()
            await asyncio.gather(*calling, return_exceptions=True)


@asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, **options) as session:
        yield Client(session, url)
