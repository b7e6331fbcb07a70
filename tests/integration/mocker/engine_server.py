"""A simulated engine server, its HTTP client, and its KV events as a router reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import zmq
import zmq.asyncio
from kvrouter.engines.events.vllm_sglang_events import Dialect
from kvrouter.engines.events.zmq_frames import EventMessage, encode_sequence, read_published, read_replayed
from kvrouter.mocker.serving.http import ServedEngine
from kvrouter.v1.common_pb2 import CopyCounting, Tier

from ...unit.engines.events.engine_frames import Engine

BLOCK = 4
EVENTS = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv"}
"""Free ports on the server's own host."""


class Client:
    """A client of a server."""

    def __init__(self, server: ServedEngine, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.server.url}{path}") as response:
            text = await response.text()
            return response.status, json.loads(text) if text[:1] in ("{", "[") else text

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(f"{self.server.url}{path}", json=body, headers=named) as response:
            text = await response.text()
            return response.status, json.loads(text) if text else None

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yields the data of each event, "[DONE]" as text."""
        async with self.session.post(f"{self.server.url}{path}", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").decode().strip()
                    yield data if data == "[DONE]" else json.loads(data)

    async def metric(self, name: str, **labels: str) -> float:
        """Returns the value of the metric whose labels contain these."""
        _, text = await self.get("/metrics")
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        (value,) = [
            line.rpartition(" ")[2]
            for line in text.splitlines()
            if line.split("{")[0] == name and all(each in line for each in wanted)
        ]
        return float(value)


async def replayed(endpoint: str, first: int = 0) -> list[EventMessage]:
    """Returns the messages from a sequence on, from a replay socket."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)
        await socket.send_multipart([b"", encode_sequence(first)])
        messages = []
        async with asyncio.timeout(10):
            while message := read_replayed(await socket.recv_multipart()):
                messages.append(message)
        return messages


def applied(messages: list[EventMessage], dialect: Dialect, copy_counting: CopyCounting) -> Engine:
    """Returns the rank and the index that result from messages."""
    engine = Engine(dialect, copy_counting, block_size=BLOCK)
    for message in messages:
        engine.receive(message.payload)
    assert engine.left_out == {}
    return engine


def blocks_of(engine: Engine, tier: Tier = Tier.TIER_DEVICE) -> dict[int, int]:
    """Returns the blocks resident in a tier and their copies."""
    return {
        block.engine_hash: each.copies
        for chunk in engine.rank.state_chunks()
        for block in chunk.blocks
        for each in block.copies
        if each.tier == tier
    }


class Subscription:
    """A subscriber of the events of a rank."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, topic: bytes = b"kv") -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic)
        self._topic = topic

    async def received_soon(self) -> EventMessage | None:
        """Returns a message if there is one already, or almost."""
        return await self.receive() if await self._socket.poll(10) else None

    async def receive(self) -> EventMessage:
        async with asyncio.timeout(10):
            message = read_published(await self._socket.recv_multipart(), self._topic)
        assert message is not None
        return message
