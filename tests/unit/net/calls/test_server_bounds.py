"""What a server stores for call streams has a bound for all streams together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
import pytest
from kvrouter.net.calls import SERVICE, CallLimits, CallStreamServer, server_connection as connections
from kvrouter.net.calls.limits import CallStreamCounts
from kvrouter.net.calls.server_call import Method
from kvrouter.net.calls.server_stream import ServerStream
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.v1.calls_pb2 import CallRequest, OpenCallStreamRequest, OpenCallStreamResponse
from kvrouter.v1.errors import KvRouterError, Unauthenticated

from ....hostile_peer import hostile_peer, message_head
from ....waiting import until
from .linked import ECHO, HELLO, TOKENS, Received
from .test_over_grpc import PATH, connected, serving


def stream(limits: CallLimits, counts: CallStreamCounts) -> ServerStream:
    methods = [Method(ECHO, unary=lambda raw, _call: raw)]
    return ServerStream(HELLO, methods, limits, counts, lambda: None, lambda _call, _answer: None)


def part(number: int, size: int, *, more: bool = True) -> bytes:
    call = CallRequest(number=number, request=b"x" * size, more=more)
    return OpenCallStreamRequest(calls=[call]).SerializeToString()


def failures(server: ServerStream) -> dict[int, int]:
    failed = {}
    while (message := server.next_message()) is not None:
        for response in OpenCallStreamResponse.FromString(message).responses:
            failed[response.number] = response.failure.code
    return failed


def test_unfinished_requests_of_all_streams_have_one_bound() -> None:
    counts = CallStreamCounts()
    limits = CallLimits(server_unfinished_bytes=10_000)
    one, two = stream(limits, counts), stream(limits, counts)
    one.receive(part(1, 6_000))
    two.receive(part(1, 4_000))
    assert counts.unfinished_bytes == 10_000
    two.receive(part(2, 1_000))
    assert failures(two) == {2: grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
    assert counts.unfinished_bytes == 10_000
    one.receive(part(1, 0, more=False))
    assert counts.unfinished_bytes == 4_000
    two.lose()
    assert counts.unfinished_bytes == 0


def test_a_request_whose_parts_stop_coming_is_given_up() -> None:
    counts = CallStreamCounts()
    server = stream(CallLimits(), counts)
    server.receive(part(1, 1_000))
    for _ in range(30):
        server.tick()
    assert failures(server) == {1: grpc.StatusCode.DEADLINE_EXCEEDED.value[0]}
    assert counts.unfinished_bytes == counts.running == 0
    server.receive(part(1, 1_000))  # It was under way.
    assert counts.unfinished_bytes == 0


async def test_unread_responses_of_all_streams_have_one_bound() -> None:
    async with serving(CallLimits(server_unread_bytes=1_000)) as server, connected(server.port) as client:
        await client.wait_ready()
        client.start(TOKENS, b"", Received())
        await until(lambda: bool(server.started), 60)
        for _ in range(20):  # in one step of the event loop, so that nothing is sent meanwhile
            server.started[0].respond(b"x" * 100)
        await until(lambda: server.streams.counts.ended["unread"] == 1, 60)
        assert server.streams.counts.unread_bytes == 0


async def test_nothing_runs_after_a_violation_in_the_same_read() -> None:
    async with serving() as server, hostile_peer(f"127.0.0.1:{server.port}") as peer:
        stream = peer.open(PATH)
        call = OpenCallStreamRequest(calls=[CallRequest(number=1, request=b"late")])
        payload = b""
        for message in (HELLO, HELLO, call):  # A second hello breaks the protocol.
            encoded = message.SerializeToString()
            payload += message_head(len(encoded)) + encoded
        peer.data(stream, payload)
        await until(lambda: sum(server.streams.counts.ended.values()) > 0 or stream in peer.ended, 60)
        assert server.streams.counts.calls == 0


def test_calls_of_all_streams_have_one_bound() -> None:
    counts = CallStreamCounts(running=3)
    server = stream(CallLimits(server_calls=3), counts)
    server.receive(part(1, 10, more=False))
    assert failures(server)[1] == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert counts.running == 3


async def open_streams(channel: grpc.aio.Channel, count: int) -> list[grpc.aio.StreamStreamCall]:
    opened = []
    for _ in range(count):
        call: grpc.aio.StreamStreamCall = channel.stream_stream(PATH)()  # type: ignore[type-arg]
        with suppress(grpc.aio.AioRpcError):
            await call.write(HELLO.SerializeToString())
            await call.read()
        opened.append(call)
    return opened


async def test_one_connection_opens_few_streams() -> None:
    async with (
        serving(CallLimits(connection_streams=2)) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        calls = await open_streams(channel, 2)
        # Without a write, which fails as an internal error if the status comes first.
        refused: grpc.aio.StreamStreamCall = channel.stream_stream(PATH)()  # type: ignore[type-arg]
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.streams.counts.streams == 2
        calls[0].cancel()
        await until(lambda: server.streams.counts.streams == 1, 60)
        await open_streams(channel, 1)
        assert server.streams.counts.streams == 2


async def test_a_further_stream_replaces_one_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_TICK_SECONDS", 0.01)
    async with serving(CallLimits(server_streams=2)) as server, connected(server.port) as busy:
        await busy.wait_ready()
        busy.start(TOKENS, b"", Received())
        await until(lambda: bool(server.started), 60)
        async with connected(server.port) as idle:
            await idle.wait_ready()
            await asyncio.sleep(0.05)
            async with connected(server.port) as further:
                await further.wait_ready()
                await until(lambda: server.streams.counts.ended["replaced"] == 1, 60)
                assert busy.running == 1


class Rotated:
    """Admits until the credential is rotated."""

    def __init__(self) -> None:
        self.valid = True
        self.refused = 0

    def peer(self, _context: ReceivedCall) -> Rotated:
        return self

    def open_stream(self, _methods: object) -> None:
        self.check("")

    def check(self, _method: str) -> None:
        if not self.valid:
            self.refused += 1
            raise Unauthenticated("expected another credential")


@asynccontextmanager
async def checking(check: Rotated, release: asyncio.Event) -> AsyncIterator[tuple[int, CallStreamServer]]:
    """Serves calls that last until they are released; yields the port."""

    async def wait(raw: bytes) -> bytes:
        await release.wait()
        return raw

    server = LoopServer(CallGate())
    streams = CallStreamServer(check=check)
    streams.add_unary(ECHO, lambda raw, _call: wait(raw))
    server.add_registered_method_handlers(SERVICE, streams.handlers())
    try:
        yield await server.start("127.0.0.1:0"), streams
    finally:
        await server.stop(0)


async def test_a_stream_whose_credential_is_no_longer_valid_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    check, release = Rotated(), asyncio.Event()
    async with checking(check, release) as (port, streams), connected(port) as client:
        await client.wait_ready()
        running = asyncio.create_task(client.call(ECHO, b"x"))
        await until(lambda: streams.running == 1, 60)
        check.valid = False
        with pytest.raises(KvRouterError) as refused:
            await client.call(ECHO, b"y")
        assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setattr(connections, "_TICK_SECONDS", 0.01)
        await until(lambda: not client.ready, 60)
        release.set()
        assert await running == b"x"  # what ran before may end
        await until(lambda: streams.counts.ended["credential"] == 1, 60)
        assert not streams.counts.streams


async def test_a_stream_that_its_client_has_ended_is_closed_whatever_becomes_of_its_credential(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(connections, "_LAST_CALL_TICKS", 100_000)
    check, release = Rotated(), asyncio.Event()
    async with (
        checking(check, release) as (port, streams),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        opened = channel.stream_stream(PATH)()
        await opened.write(HELLO.SerializeToString())
        await opened.write(part(1, 1, more=False))
        await opened.done_writing()
        await until(lambda: streams.running == 1, 60)
        check.valid = False
        await until(lambda: check.refused > 0, 60)
        release.set()
        while await opened.read() is not grpc.aio.EOF:
            pass
        await until(lambda: streams.counts.ended["closed"] == 1, 60)
