"""Call streams between a client and a server over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from kvrouter.net.calls import (
    SERVICE,
    CallLimits,
    CallStreamClient,
    CallStreamServer,
    NotSent,
    OutcomeUnknown,
    ServerCall,
)
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.v1.calls_pb2 import (
    CallRequest,
    CallResponse,
    CallResponseKind,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)
from kvrouter.v1.errors import DeadlineExceeded, NotFound

from ....waiting import until
from .linked import ECHO, HELLO, SERVER_HELLO, TOKENS, Received

DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED

PATH = f"/{SERVICE}/OpenCallStream"


class Server:
    """A call stream server with an echo and a streaming method."""

    def __init__(self, limits: CallLimits | None = None, port: int = 0) -> None:
        self.release = asyncio.Event()
        self.started: list[ServerCall] = []
        self.cancelled = 0
        self.streams = CallStreamServer(limits=limits)
        self.streams.add_unary(ECHO, lambda raw, _call: raw)
        self.streams.add_unary("test.Service/Wait", self._wait)
        self.streams.add_streaming(TOKENS, lambda _raw, call: self.started.append(call))
        self.grpc = LoopServer(CallGate())
        self.grpc.add_registered_method_handlers(SERVICE, self.streams.handlers())
        self.port = port

    def _wait(self, raw: bytes, _call: ServerCall) -> Awaitable[bytes]:
        async def wait() -> bytes:
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            return raw

        return wait()


@asynccontextmanager
async def serving(limits: CallLimits | None = None, port: int = 0) -> AsyncIterator[Server]:
    server = Server(limits, port)
    server.port = await server.grpc.start(f"127.0.0.1:{port}")
    try:
        yield server
    finally:
        await server.grpc.stop(0)


@asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[CallStreamClient]:
    client = CallStreamClient(f"127.0.0.1:{port}", client_name="tester", **options)
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_unary_and_streaming_calls_share_a_stream() -> None:
    async with serving() as server, connected(server.port) as client:
        received = Received()
        await client.wait_ready()
        client.start(TOKENS, b"", received)
        assert await client.call(ECHO, b"x" * 500_000) == b"x" * 500_000
        server.started[0].respond(b"a")
        server.started[0].end(b"b")
        await until(lambda: received.ended == 1, 60)
        assert received.responses == [b"a", b"b"]
        assert server.streams.counts.opened == 1


async def test_concurrent_calls_travel_in_few_messages() -> None:
    async with serving() as server, connected(server.port) as client:
        await client.wait_ready()
        before = client.counts.messages_sent
        await asyncio.gather(*(client.call(ECHO, b"x") for _ in range(200)))
        assert client.counts.messages_sent - before < 20


async def test_a_call_waits_for_the_first_stream() -> None:
    async with serving() as server, connected(server.port) as client:
        assert not client.ready
        assert await client.call(ECHO, b"x") == b"x"


async def test_without_a_server_a_call_is_not_sent_and_fails_at_once() -> None:
    async with connected(1) as client:
        for _ in range(3):
            with pytest.raises(NotSent):
                await client.call(ECHO, b"x", time_left=60.0)
        with pytest.raises(NotSent):
            client.start(ECHO, b"x", Received())


async def test_a_call_is_cancelled_on_the_server_when_its_caller_is() -> None:
    async with serving() as server, connected(server.port) as client:
        calling = asyncio.create_task(client.call("test.Service/Wait", b""))
        await until(lambda: server.streams.running == 1, 60)
        calling.cancel()
        await until(lambda: server.cancelled == 1, 60)
        assert await client.call(ECHO, b"x") == b"x"


async def test_a_call_that_is_not_answered_in_time_is_cancelled_on_the_server() -> None:
    async with serving() as server, connected(server.port) as client:
        # Both ends have the deadline; whichever notices it first ends the call.
        with pytest.raises(DeadlineExceeded) as failed:
            await client.call("test.Service/Wait", b"", time_left=0.1)
        assert failed.value.code == DEADLINE_EXCEEDED
        await until(lambda: server.cancelled == 1, 60)


async def test_a_killed_server_leaves_calls_with_an_unknown_outcome_and_the_client_reconnects() -> None:
    async with serving() as server, connected(server.port) as client:
        calling = asyncio.create_task(client.call("test.Service/Wait", b""))
        await until(lambda: server.streams.running == 1, 60)
        await server.grpc.stop(0)
        with pytest.raises(OutcomeUnknown):
            await calling
        async with serving(port=server.port):
            await asyncio.wait_for(client.wait_ready(), 60)
            assert await client.call(ECHO, b"x") == b"x"
        assert client.counts.opened == 2


async def test_a_drained_server_answers_running_calls_and_refuses_new_ones() -> None:
    async with serving() as server, connected(server.port) as client:
        calling = asyncio.create_task(client.call("test.Service/Wait", b"x"))
        await until(lambda: server.streams.running == 1, 60)
        draining = asyncio.create_task(server.streams.drain())
        await until(lambda: not client.ready, 60)
        with pytest.raises(NotSent):
            client.start(ECHO, b"", Received())
        assert not draining.done()
        server.release.set()
        assert await calling == b"x"
        await asyncio.wait_for(draining, 60)


async def test_a_client_that_closes_its_sending_side_still_gets_its_answers() -> None:
    async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        rpc: Any = channel.stream_stream(PATH)()
        await rpc.write(HELLO.SerializeToString())
        await rpc.write(OpenCallStreamRequest(calls=[CallRequest(number=1, method=1)]).SerializeToString())
        await until(lambda: server.streams.running == 1, 60)
        await rpc.done_writing()
        await until(lambda: server.streams.counts.streams == 1, 60)
        server.release.set()
        messages = [OpenCallStreamResponse.FromString(each) async for each in rpc]
        assert [each.number for message in messages for each in message.responses] == [1]
        assert await rpc.code() == grpc.StatusCode.OK


async def test_a_client_that_does_not_read_loses_its_stream_and_delays_nobody() -> None:
    limits = CallLimits(unread_call_bytes=1 << 30, unread_stream_bytes=16 << 20)
    async with (
        serving(limits) as server,
        connected(server.port) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=(("test.stalled", 1),)) as channel,
    ):
        await client.wait_ready()
        rpc: Any = channel.stream_stream(PATH)()
        await rpc.write(HELLO.SerializeToString())
        await rpc.write(OpenCallStreamRequest(calls=[CallRequest(number=1, method=2)]).SerializeToString())
        await until(lambda: len(server.started) == 1, 60)
        (stalled,) = server.started
        largest = 0
        while not stalled.ended:
            stalled.respond(b"x" * 100_000)
            largest = max(largest, stalled.unread_bytes)
            assert await client.call(ECHO, b"x") == b"x"
        assert largest <= 17 << 20
        await until(lambda: server.streams.counts.ended["unread"] == 1, 60)
        rpc.cancel()


async def test_a_silent_server_is_given_up() -> None:
    """A server that accepts the stream and then does nothing, like a process that was stopped."""
    opened = 0

    async def serve(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        nonlocal opened
        opened += 1
        await context.write(SERVER_HELLO)
        await asyncio.Event().wait()

    async with _custom_server(serve) as port, connected(port, heartbeat_timeout_seconds=0.2) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call(ECHO, b"x")
        assert client.counts.ended["silent"] >= 1
        await until(lambda: opened >= 2, 60)


async def _read_all(rpc: Any) -> None:
    while await rpc.read() is not grpc.aio.EOF:
        pass


def _calls(*calls: CallRequest) -> bytes:
    return OpenCallStreamRequest(calls=calls).SerializeToString()


VIOLATIONS = {
    "garbage": (b"\xff\xff\xff", "garbage"),
    "a message of 64 MB": (_calls(CallRequest(number=1, request=bytes(60 << 20))), "too_long"),
    "a million calls": (_calls(CallRequest(number=1)) * 1_000_000, "too_long"),
    "a call without number": (_calls(CallRequest()), "unknown_call"),
    "a call number that is skipped": (_calls(CallRequest(number=2)), "unknown_call"),
    "a call number twice": (_calls(CallRequest(number=1), CallRequest(number=1)), "unknown_call"),
    "a cancel of an unknown call": (OpenCallStreamRequest(cancelled=[7]).SerializeToString(), "unknown_call"),
    "a second hello": (HELLO.SerializeToString(), "hello"),
    "an unknown kind of item": (b"\x9a\x06\x02hi", "unknown_kind"),
}


@pytest.mark.parametrize(("message", "reason"), VIOLATIONS.values(), ids=VIOLATIONS)
async def test_a_client_that_violates_the_protocol_loses_only_its_own_stream(message: bytes, reason: str) -> None:
    async with (
        serving() as server,
        connected(server.port) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        waiting = asyncio.create_task(client.call("test.Service/Wait", b"x"))
        await until(lambda: server.streams.running == 1, 60)
        rpc: Any = channel.stream_stream(PATH)()
        await rpc.write(HELLO.SerializeToString())
        await rpc.read()
        await rpc.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _read_all(rpc)
        expected = grpc.StatusCode.UNIMPLEMENTED if reason == "unknown_kind" else grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.code() == expected
        await until(lambda: server.streams.counts.ended[reason] == 1, 60)
        server.release.set()
        assert await waiting == b"x"
        assert client.counts.opened == 1


async def test_a_first_message_without_hello_is_refused() -> None:
    async with serving() as server, grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        rpc: Any = channel.stream_stream(PATH)()
        await rpc.write(_calls(CallRequest(number=1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rpc.read()
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.streams.counts.ended["hello"] == 1


_LAST = CallResponseKind.CALL_RESPONSE_KIND_LAST
SERVER_VIOLATIONS = {
    "garbage": (b"\xff\xff\xff", "garbage"),
    "a response to an unknown call": (CallResponse(number=99, kind=_LAST), "unknown_call"),
    "an unknown kind of response": (CallResponse(number=1, kind=77), "unknown_kind"),  # type: ignore[arg-type]
    "a whole response to an unknown call": (
        OpenCallStreamResponse(whole_numbers=[99], whole_responses=[b"x"]).SerializeToString(),
        "unknown_call",
    ),
    "a message of 64 MB": (OpenCallStreamResponse(whole_responses=[bytes(60 << 20)]).SerializeToString(), "too_long"),
    "more numbers than whole responses": (
        OpenCallStreamResponse(whole_numbers=[1, 1], whole_responses=[b"x"]).SerializeToString(),
        "columns",
    ),
}


@pytest.mark.parametrize(("answer", "reason"), SERVER_VIOLATIONS.values(), ids=SERVER_VIOLATIONS)
async def test_a_server_that_violates_the_protocol_loses_its_stream(answer: bytes | CallResponse, reason: str) -> None:
    encoded = answer if isinstance(answer, bytes) else OpenCallStreamResponse(responses=[answer]).SerializeToString()

    async with _custom_server(_answering(encoded)) as port, connected(port) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call(ECHO, b"x")
        assert client.counts.ended[reason] == 1


async def test_a_server_of_another_protocol_is_counted_and_tried_again() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, connected(server.sockets[0].getsockname()[1]) as client:
        with pytest.raises(NotSent):
            await client.call(ECHO, b"x")
        await until(lambda: connections >= 2, 60)
        assert client.counts.ended["http2"] >= 1


async def test_a_second_answer_to_a_call_ends_the_stream() -> None:
    twice = [CallResponse(number=1, kind=_LAST), CallResponse(number=1, kind=_LAST)]
    encoded = OpenCallStreamResponse(responses=twice).SerializeToString()
    async with _custom_server(_answering(encoded)) as port, connected(port) as client:
        assert await client.call(ECHO, b"x") == b""
        await until(lambda: client.counts.ended["unknown_call"] == 1, 60)


async def test_a_refusal_arrives_with_its_details() -> None:
    async with serving() as server, connected(server.port) as client:

        def refuse(_raw: bytes, _call: ServerCall) -> bytes:
            raise NotFound("no such thing")

        server.streams._methods[0] = type(server.streams._methods[0])(ECHO, unary=refuse)
        with pytest.raises(NotFound, match="no such thing") as caught:
            await client.call(ECHO, b"x")
        assert caught.value.code == grpc.StatusCode.NOT_FOUND


def _answering(encoded: bytes) -> Callable[..., Awaitable[None]]:
    async def serve(_requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.write(SERVER_HELLO)
        await context.read()
        while True:
            message = await context.read()
            if OpenCallStreamRequest.FromString(message).calls:
                await context.write(encoded)

    return serve


@asynccontextmanager
async def _custom_server(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[int]:
    server = grpc.aio.server()
    handlers: dict[str, Any] = {"OpenCallStream": grpc.stream_stream_rpc_method_handler(serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0)
