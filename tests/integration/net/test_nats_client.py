"""The NATS client does not lose what its library loses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kvrouter.net.budgets import PASS_US, loop_budget
from kvrouter.net.nats.client import TolerantClient
from nats.aio.msg import Msg
from nats.errors import FlushTimeoutError


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


class _SlowClient(TolerantClient):
    """Asks for the first PONG only after the server has sent a PING, as a client that stops for two seconds may."""

    def _connect_command(self) -> bytes:
        transport: Any = self._transport
        drain = transport.drain

        async def drain_late() -> None:
            transport.drain = drain
            while b"PING" not in transport._io_reader._buffer:
                await asyncio.sleep(0.01)

        transport.drain = drain_late
        return super()._connect_command()


async def test_a_server_that_pings_before_its_first_pong_gets_what_is_sent(nats_url: str) -> None:
    client = _SlowClient()
    await client.connect(nats_url)
    received = asyncio.Event()

    async def take(_: Msg) -> None:
        received.set()

    try:
        assert client.is_connected
        await client.subscribe("slow", cb=take)
        await client.publish("slow", b"")
        async with asyncio.timeout(30):
            await received.wait()
    finally:
        await client.close()


class _Written(TolerantClient):
    """Notes the commands that it sends."""

    sent = b""

    def _connect_command(self) -> bytes:
        transport: Any = self._transport
        write, write_lines = transport.write, transport.writelines

        def note(data: bytes) -> None:
            self.sent += data
            write(data)

        def note_lines(lines: list[bytes]) -> None:
            self.sent += b"".join(lines)
            write_lines(lines)

        transport.write, transport.writelines = note, note_lines
        return super()._connect_command()


async def test_a_flush_asks_after_the_subscriptions_before_it(nats_url: str) -> None:
    client = _Written()
    await client.connect(nats_url)
    try:
        for subject in ("one", "two"):
            await client.subscribe(subject)
        await client.flush()
    finally:
        await client.close()
    commands = [line.split()[0] for line in client.sent.splitlines()]
    assert commands == [b"CONNECT", b"PING", b"SUB", b"SUB", b"PING"]


async def test_a_flush_after_a_late_first_pong_waits_for_its_own(nats_url: str) -> None:
    client = _SlowClient()
    await client.connect(nats_url)
    try:
        flushing = client._pongs_received
        await client.flush()
        assert client._pongs_received - flushing == 2, "the PONG of the connection, then that of the flush"
    finally:
        await client.close()


async def _connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serves a client until its first PING."""
    writer.write(b'INFO {"server_id": "x", "max_payload": 8388608, "headers": true}\r\n')
    while not (await reader.readline()).startswith(b"PING"):
        pass
    writer.write(b"PONG\r\n")


async def test_a_flush_ends_in_time_at_a_server_that_reads_nothing() -> None:
    client = TolerantClient()
    connections = 0
    received = bytearray()
    stuck, ended = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await _connected(reader, writer)
        if connections == 1:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await stuck.wait()
            writer.transport.abort()
            return
        while data := await reader.read(1 << 20):
            received.extend(data)
            if b"PUB end" in received:
                ended.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, asyncio.timeout(30):
        url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await client.connect(url, pending_size=1 << 30, reconnect_time_wait=0.1)
        for _ in range(40):
            await client.publish("full", bytes(1 << 20))
        while client._pending:  # until the flusher has written it, and waits for the server
            await asyncio.sleep(0)
        with pytest.raises(FlushTimeoutError):
            await client.flush(timeout=1)
        # The next connection sends what waits, without the PING: its flush would get the wrong PONG.
        stuck.set()
        while connections < 2 or not client.is_connected:
            await asyncio.sleep(0.01)
        await client.publish("end", b"")
        await ended.wait()
        assert received.count(b"PING\r\n") == 1
        client._transport.close()


async def test_messages_that_were_read_together_are_handled_over_several_passes(nats_url: str) -> None:
    client, publisher = TolerantClient(), TolerantClient()
    await client.connect(nats_url)
    await publisher.connect(nats_url)
    received = 0

    async def take(_: Msg) -> None:
        nonlocal received
        received += 1

    try:
        await client.subscribe("flood", cb=take)
        await client.flush()
        for _ in range(2_000):
            await publisher.publish("flood", b"")
        in_a_pass = 0
        async with asyncio.timeout(60):
            while received < 2_000:
                before = received
                await asyncio.sleep(0)
                in_a_pass = max(in_a_pass, received - before)
    except TimeoutError:
        state = f"connected: {publisher.is_connected}, {client.is_connected}; {publisher.stats}, {client.stats}"
        pytest.fail(f"{received} of 2,000 messages arrived; {state}; {vars(loop_budget())}")
    finally:
        await client.close()
        await publisher.close()
    # At least 50 us are estimated for a message, and two counts may be up to two passes apart.
    assert in_a_pass <= 2 * PASS_US / 50


async def test_messages_of_several_subscriptions_are_handled_as_they_were_read(nats_url: str) -> None:
    client, publisher = TolerantClient(), TolerantClient()
    failures: list[Exception] = []
    handled: list[bytes] = []
    ended = asyncio.Event()

    async def on_error(error: Exception) -> None:
        failures.append(error)

    async def take(message: Msg) -> None:
        handled.append(message.data)
        if message.data == b"1":
            raise ValueError("unexpected")
        if message.data == b"5":
            ended.set()

    await client.connect(nats_url, error_cb=on_error)
    await publisher.connect(nats_url)
    try:
        for subject in ("even", "odd"):
            await client.subscribe(subject, cb=take)
        await client.flush()
        for number in range(6):
            await publisher.publish("odd" if number % 2 else "even", b"%d" % number)
        async with asyncio.timeout(30):
            await ended.wait()
    finally:
        await client.close()
        await publisher.close()
    assert handled == [b"%d" % number for number in range(6)]
    assert [str(failure) for failure in failures] == ["unexpected"], "a failed callback ends nothing"


async def test_messages_that_are_taken_at_once_keep_their_place_among_others(nats_url: str) -> None:
    client, publisher = TolerantClient(), TolerantClient()
    sizes = [number * 997 % 20_000 for number in range(1, 400)]
    handled: list[int] = []
    at_once = 0
    ended = asyncio.Event()

    def receive(_subject: str, _reply: str, data: bytes) -> bool:
        nonlocal at_once
        if len(data) % 5 == 1:
            raise ValueError("unexpected")
        if len(data) % 5 == 2:
            return False
        at_once += 1
        handled.append(len(data))
        return True

    async def take(message: Msg) -> None:
        handled.append(len(message.data))
        if message.subject == "end":
            ended.set()

    await client.connect(nats_url)
    await publisher.connect(nats_url)
    try:
        await client.subscribe("end", cb=take)
        subscription = await client.subscribe("sizes", cb=take)
        client.receive_at_once(subscription, receive)
        await client.flush()
        await publisher.publish("sizes", b"")
        async with asyncio.timeout(60):
            while not handled:
                await asyncio.sleep(0)
        assert at_once == 1
        for size in sizes:
            await publisher.publish("sizes", bytes(size), headers={"Status": "none"} if size % 2 else None)
        await publisher.publish("end", bytes(7))
        async with asyncio.timeout(60):
            await ended.wait()
        await subscription.unsubscribe()
        assert not client._receivers
        assert (client.stats["in_msgs"], client.stats["reconnects"]) == (len(handled), 0)
    finally:
        await client.close()
        await publisher.close()
    assert handled == [0, *sizes, 7]
