"""Writes a key to etcd and creates an event stream: ``net.py NATS_URL ETCD_ENDPOINT``."""

from __future__ import annotations

import asyncio
import sys
import uuid

import grpc
import nats
from kvrouter.net.etcd import connect
from kvrouter.net.http2.options import CHANNEL_OPTIONS
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1.names import ComponentName


async def main(nats_url: str, etcd: str) -> None:
    """Reads back what it wrote."""
    component = ComponentName(f"packages-{uuid.uuid4().hex[:8]}", "pool")
    async with connect(etcd) as keys:
        await keys.put(str(component).encode(), b"here")
        found = await keys.get(str(component).encode())
        assert found is not None
        assert found.value == b"here"
    client = await nats.connect(nats_url)
    stream = await ensure_stream(client.jetstream(), component, max_bytes=16 << 20)
    assert stream.config.name == component.stream
    await client.close()
    async with grpc.aio.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS):
        pass


asyncio.run(main(*sys.argv[1:]))
