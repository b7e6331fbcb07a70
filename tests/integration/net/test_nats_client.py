"""The NATS client does not lose what its library loses."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.net.nats_client import TolerantClient
from nats.aio.msg import Msg


async def test_a_request_that_is_cancelled_together_with_its_reply_is_cancelled(nats_url: str) -> None:
    client = TolerantClient()
    await client.connect(nats_url)
    cancelled: list[asyncio.Task[Msg]] = []

    async def answer(request: Msg) -> None:
        await request.respond(b"")

    def cancel(_: object) -> None:
        cancelled.append(asking)
        asking.cancel()

    try:
        await client.subscribe("questions", cb=answer)
        await client.request("questions")  # Opens the subscription to replies.
        asking = asyncio.create_task(client.request("questions"))
        while not client._resp_map:
            await asyncio.sleep(0)
        (reply,) = client._resp_map.values()
        reply.add_done_callback(cancel)
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert cancelled == [asking]
    finally:
        await client.close()
