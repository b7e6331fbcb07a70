"""A tenant that floods the tokenizer delays the chats of others by a few slices."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.devtools.system.stack import service_environment

from ..gateway import MODEL, System
from .keys import Keys

FLOOD = 40
WORD = "qwertyuiopasdfghjklzxcvbnm" * 2_400
"""A text without a space, which no cache has."""


@pytest.fixture
async def frontend(system: System, tmp_path: Path) -> AsyncIterator[tuple[str, Keys]]:
    """HTTP address of a Frontend in a process of its own, and its keys."""
    keys = Keys(tmp_path / "keys.json")
    for name in ("flood", "quiet"):
        keys.add(name)
    keys.add("admin", role="admin")
    keys.write()
    directory = tmp_path / "tokenizer"
    directory.mkdir()
    write_small_tokenizer(directory)
    await system.start_worker(1, vocabulary_size=VOCABULARY_SIZE)
    (port,) = free_ports(1)
    where = [each for name, value in system.where.items() for each in (f"--{name}", str(value))]
    arguments = (
        *("--port", str(port), "--drain-seconds", "0", "--api-keys", str(keys.path), "--no-web-page"),
        *("--tokenizers", f"{MODEL}={directory}"),
    )
    program = (sys.executable, "-m", "kvrouter.frontend", *where)
    process = await ManagedProcess.start(
        Command("frontend", (*program, *arguments), service_environment(os.environ)), tmp_path
    )
    yield f"http://127.0.0.1:{port}", keys
    await process.stop(10)


class Client:
    """Chats with a Frontend."""

    def __init__(self, http: aiohttp.ClientSession, keys: Keys) -> None:
        self._http = http
        self._keys = keys

    async def chat(self, key: str, text: str) -> int:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {self._keys[key]}"}
        async with self._http.post("/v1/chat/completions", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def waiting_bytes(self) -> float:
        """Returns how much text waits or is tokenized."""
        headers = {"authorization": f"Bearer {self._keys['admin']}"}
        async with self._http.get("/metrics", headers=headers) as response:
            text = await response.text()
        found = re.search(r'^kvrouter_bound_used\{bound="client_work_bytes".*\} (\S+)$', text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    async def until_served(self) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    if await self.chat("quiet", "Hi") == 200:
                        return
                except aiohttp.ClientConnectorError:
                    pass
                await asyncio.sleep(0.1)


@pytest.mark.full
async def test_a_flood_of_one_key_delays_the_chat_of_another_by_a_few_slices(frontend: tuple[str, Keys]) -> None:
    address, keys = frontend
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(address, connector=connector) as http:
        client = Client(http, keys)
        await client.until_served()
        flood = [asyncio.create_task(client.chat("flood", f"{number}{WORD}")) for number in range(FLOOD)]
        all_of_it = FLOOD * len(WORD)
        async with asyncio.timeout(60):
            while await client.waiting_bytes() < 0.75 * all_of_it:
                assert not all(task.done() for task in flood), "the flood is tokenized too fast to wait"
        assert await client.chat("quiet", "one two three") == 200
        # First come, first served, nearly all of the flood would have been tokenized before.
        assert await client.waiting_bytes() > 0.25 * all_of_it
        for task in flood:
            task.cancel()
        await asyncio.wait(flood)
