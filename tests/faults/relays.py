"""An engine in the test's process whose worker is a relay, in a process that can be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kvrouter.mocker.engine.types import CacheEvent, Removed, Stored

from .rig import PATIENCE_SECONDS, TREE, EngineNode, Rig


class RelayedNode(EngineNode):
    """Numbers the messages of its engine, and repeats those that the relay lacks."""

    def __init__(self, rig: Rig, worker_id: int, clock: Path | None) -> None:
        super().__init__(rig.rng.randrange(1 << 32), self._tell)
        self.incarnations: list[int] = []
        """Of each relay that came."""
        self.oldest = 0
        """Number of the oldest message that can be repeated."""
        self.state = rig.directory / f"state-{worker_id}"
        self._settings = {
            "worker_id": worker_id,
            "etcd": rig.etcd.endpoint,
            "nats": rig.nats.url,
            "state": str(self.state),
            "engine_incarnation": "one",
            "lease_ttl_seconds": 2,
            "state_seconds": 0.05,
        }
        self._messages: list[list[list[Any]]] = []
        self._notified = asyncio.Event()
        self._recorded = (-1, (0, 0))
        self._process: asyncio.subprocess.Process | None = None
        self._port = 0
        self._clock = clock
        self._feeding = 0

    @property
    def cursor(self) -> tuple[int, int]:
        """Of the relay, once it has recorded everything."""
        number, cursor = self._recorded
        return cursor if number + 1 == len(self._messages) else (0, 0)

    @asynccontextmanager
    async def fed(self) -> AsyncIterator[None]:
        """Feeds relays while the context lasts."""
        server = await asyncio.start_server(self._feed, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            await self.kill_relay()
            server.close()

    async def start_relay(self) -> None:
        """Starts a relay; returns when it is connected, and the file that a next one goes on from is written."""
        count = len(self.incarnations)
        launcher = ("-m", "tests.faults.shifted_clock", str(self._clock)) if self._clock else ("-m",)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, *launcher, "tests.faults.relay_process", str(self._port), json.dumps(self._settings)),
            cwd=TREE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.incarnations) == count or not list(self.state.glob("*.snapshot")):
                await asyncio.sleep(0.02)

    async def kill_relay(self) -> None:
        process, self._process = self._process, None
        self._notified.set()
        if process is not None:
            process.kill()
            await process.wait()
        while self._feeding:
            await asyncio.sleep(0.01)

    def forget_messages(self) -> None:
        """Makes the engine unable to repeat the events that it has reported."""
        self.oldest = len(self._messages)

    def _tell(self, events: Sequence[CacheEvent]) -> None:
        if events:
            self._messages.append([_as_json(event) for event in events])
            self._notified.set()

    async def _feed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._feeding += 1
        try:
            await self._repeat(reader, writer)
        finally:
            self._feeding -= 1
            writer.close()

    async def _repeat(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, json.JSONDecodeError):  # what a relay leaves when it is killed
            writer.write(json.dumps({"oldest": self.oldest}).encode() + b"\n")
            begin = json.loads(await reader.readline())
            number = begin["from"]
            self._note(number - 1, begin)
            self.incarnations.append(begin["incarnation"])
            while True:
                while number == len(self._messages):
                    self._notified.clear()
                    await self._notified.wait()
                    if self._process is None:
                        return
                message = {"number": number, "events": self._messages[number]}
                writer.write(json.dumps(message).encode() + b"\n")
                self._note(number, json.loads(await reader.readline()))
                number += 1

    def _note(self, number: int, answer: dict[str, int]) -> None:
        self._recorded = number, (answer["incarnation"], answer["next_event_id"])


def _as_json(event: CacheEvent) -> list[Any]:
    match event:
        case Stored(parent, names, tokens, _):
            return ["stored", parent, list(names), tokens.hex()]
        case Removed(names):
            return ["removed", list(names)]
        case _:
            return ["cleared"]


async def start_relayed(rig: Rig, worker_id: int, clock: Path | None = None) -> RelayedNode:
    """Starts an engine and its relay, until the end of the test; ``clock`` shifts the relay's (``shifted_clock``)."""
    node = RelayedNode(rig, worker_id, clock)
    await rig.exits.enter_async_context(node.fed())
    await node.start_relay()
    rig.nodes[worker_id] = node
    return node
