"""The engine's side of a relay: sockets that publish, repeat and lose messages, and a reader of the relay's state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from kvrouter.core import Scope, local_hashes
from kvrouter.devtools.system.ports import free_port
from kvrouter.engines.events.zmq_frames import END_OF_REPLAY, encode_sequence, read_replay_request
from kvrouter.publisher.worker import Worker
from kvrouter.relay.app import running
from kvrouter.relay.settings import RelaySettings
from prometheus_client import CollectorRegistry

from ...waiting import until

BLOCK = 4


def tokens(first: int, blocks: int) -> list[int]:
    return list(range(first, first + blocks * BLOCK))


def stored(hashes: list[int], first: int, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    known = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens(first, len(hashes)),
        "block_size": BLOCK,
        "medium": "GPU",
    }
    return known | fields


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class Engine:
    """Publishes batches on ports of its own, and may lose them or die."""

    def __init__(self, *, replays: bool = True, topic: bytes = b"kv") -> None:
        self.events_endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay_endpoint = f"tcp://127.0.0.1:{free_port()}" if replays else ""
        self.requests: list[int] = []
        self.kept: list[tuple[int, bytes]] = []
        self.next_sequence = 0
        self._topic = topic
        self._context: zmq.asyncio.Context | None = None
        self._answering: asyncio.Task[None] | None = None
        self._is_subscribed = False

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._is_subscribed = False
        self._events = self._context.socket(zmq.XPUB)
        self._events.bind(self.events_endpoint)
        if self.replay_endpoint:
            replays = self._context.socket(zmq.ROUTER)
            replays.bind(self.replay_endpoint)
            self._answering = asyncio.create_task(self._answer(replays))

    async def stop(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    async def subscribed(self) -> None:
        """Returns when a subscription has arrived, a moment after its connection: what is published before is lost."""
        if self._context is not None and not self._is_subscribed:
            await self._events.recv()
            self._is_subscribed = True

    async def restart(self) -> None:
        """Dies, and begins another lifetime with an empty cache."""
        await self.stop()
        self.forget()
        await self.start()

    def forget(self) -> None:
        """Counts from the start with nothing kept, as after a restart, at sockets that stay open."""
        self.next_sequence = 0
        self.kept.clear()

    async def publish(self, *events: Any, live: bool = True, kept: bool = True) -> None:
        """Publishes a batch: to subscribers unless it is not ``live``, and for replays if it is ``kept``."""
        await self.publish_raw(
            msgspec.msgpack.encode([float(self.next_sequence), list(events), 0]), live=live, kept=kept
        )

    async def publish_raw(self, payload: bytes, *, live: bool = True, kept: bool = True) -> None:
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        if kept:
            self.kept.append((sequence, payload))
        if live:
            await self._events.send_multipart([self._topic, encode_sequence(sequence), payload])

    async def send_frames(self, frames: list[bytes]) -> None:
        await self._events.send_multipart(frames)

    async def _answer(self, replays: zmq.asyncio.Socket) -> None:
        while True:
            requester, first = read_replay_request(await replays.recv_multipart())
            self.requests.append(first)
            for sequence, payload in list(self.kept):
                if sequence >= first:
                    await replays.send_multipart([requester, b"", self._topic, encode_sequence(sequence), payload])
            await replays.send_multipart([requester, b"", b"", encode_sequence(END_OF_REPLAY), b""])


class Relay:
    """A running relay, with what its metrics say and its ranks hold."""

    def __init__(self, worker: Worker, registry: CollectorRegistry, engine: Engine | None) -> None:
        self.worker = worker
        self._registry = registry
        self._engine = engine

    def count(self, name: str, dp_rank: int = 0, **labels: str) -> float:
        rank = {"worker_id": str(self.worker.config.worker_id), "dp_rank": str(dp_rank)}
        value = self._registry.get_sample_value(f"kvrouter_relay_{name}", rank | labels)
        return 0 if value is None else value

    def blocks(self, dp_rank: int = 0) -> set[int]:
        chunks = self.worker.rank(dp_rank).state_chunks()
        return {block.engine_hash for chunk in chunks for block in chunk.blocks}

    def local_hashes(self, dp_rank: int = 0) -> set[int]:
        chunks = self.worker.rank(dp_rank).state_chunks()
        return {block.local_hash for chunk in chunks for block in chunk.blocks}

    @property
    def partial(self) -> bool:
        return self.worker.rank(0).stats().partial

    async def holds(self, *blocks: int, dp_rank: int = 0) -> None:
        """Waits until the rank holds exactly these blocks."""
        await until(lambda: self.blocks(dp_rank) == set(blocks))

    async def is_connected(self) -> None:
        """Waits until the engine's publisher is connected and subscribed to, and the first messages were compared."""
        await until(lambda: self.count("connected") == 1)
        if self._engine is not None:
            async with asyncio.timeout(30):
                await self._engine.subscribed()


def hashes_of(token_ids: list[int], scope: Scope = Scope()) -> Iterator[int]:  # noqa: B008 - immutable
    packed = local_hashes(token_ids, BLOCK, scope)
    for at in range(0, len(packed), 8):
        yield int.from_bytes(packed[at : at + 8], "little")


def settings(namespace: str, etcd: str, nats: str, engine: Engine, /, **options: Any) -> RelaySettings:
    known: dict[str, Any] = {
        "namespace": namespace,
        "etcd": etcd,
        "nats": nats,
        "kv_events": engine.events_endpoint,
        "kv_replay": engine.replay_endpoint,
        "model": "m",
        "block_size": BLOCK,
        "replay_seconds": 5.0,
        "lease_seconds": 2,
        "drain_seconds": 0.2,
        "engine_grace_seconds": 0.2,
    }
    return RelaySettings(**(known | options))


@asynccontextmanager
async def relaying(chosen: RelaySettings, engine: Engine | None = None) -> AsyncIterator[Relay]:
    registry = CollectorRegistry()
    async with running(chosen, registry) as worker:
        yield Relay(worker, registry, engine)


Beside = Callable[..., AbstractAsyncContextManager[Relay]]
"""Runs a relay beside an engine."""
