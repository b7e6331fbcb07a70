"""The client of a call stream when its connection is refused, replaced, broken or hostile."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import structlog
from kvrouter.net.calls import CallStreamClient, NotSent, OutcomeUnknown, client_stream
from kvrouter.net.http2 import connection
from kvrouter.net.http2.frames import Kind, frame, settings, window_update
from kvrouter.v1.calls_pb2 import OpenCallStreamResponse

from ....waiting import until
from ..http2.http2_server import data, ended, headers
from .linked import ECHO, Received
from .scripted_server import Accepted, scripted
from .test_over_grpc import connected, serving


def patient(port: int, **options: Any) -> AbstractAsyncContextManager[CallStreamClient]:
    """A client that does not give a scripted server up, which answers no heartbeats."""
    return connected(port, heartbeat_timeout_seconds=60.0, ends_when_silent=False, **options)


async def test_a_goaway_lets_calls_finish_and_new_ones_use_a_new_connection() -> None:
    release = asyncio.Event()
    first_closed = asyncio.Event()

    async def serve(accepted: Accepted, number: int) -> None:
        await accepted.open()
        if number > 1:
            await accepted.answer_all()
        calls = [await accepted.call() for _ in range(40)]
        accepted.go_away((1 << 31) - 1)
        accepted.go_away(1)
        await release.wait()
        for call in calls:
            accepted.answer(call)
        await accepted.closed()
        first_closed.set()

    async with scripted(serve) as port, patient(port) as client:
        running = [asyncio.create_task(client.call(ECHO, b"%d" % index)) for index in range(40)]
        await until(lambda: client.counts.opened == 2, 60)
        assert await client.call(ECHO, b"new") == b"new"
        assert client.running == 40
        assert client.counts.streams == 2
        release.set()
        assert await asyncio.gather(*running) == [b"%d" % index for index in range(40)]
        await asyncio.wait_for(first_closed.wait(), 60)
        await until(lambda: client.counts.streams == 1, 60)
        assert not client.counts.failed
        assert client.running == 0


async def test_a_maximum_connection_age_cuts_no_call_off() -> None:
    async with serving() as server, patient(server.port) as client:
        waiting = asyncio.create_task(client.call("test.Service/Wait", b"x"))
        for opened in (1, 2, 3):
            await until(lambda opened=opened: client.counts.opened == opened and client.ready, 60)
            await client.call(ECHO, b"x")
            for connection in server.grpc.connections:
                connection.calls.drain()
        assert not waiting.done()
        server.release.set()
        assert await waiting == b"x"
        assert not client.counts.failed


async def test_streams_that_finish_their_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.net.calls.client._MAX_RETIRED", 2)

    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.call()
        accepted.go_away(1)
        await accepted.closed()

    async with scripted(serve) as port, patient(port) as client:
        lost: list[Received] = []
        while client.counts.failed["unknown"] < 3:
            await client.wait_ready()
            lost.append(Received())
            client.start(ECHO, b"", lost[-1])
            assert client.counts.streams <= 4
            await client.wait_lost()
        assert isinstance(lost[0].errors[0], OutcomeUnknown)


REFUSALS = {
    "the connection": frame(Kind.GOAWAY, bytes(8)),
    "the stream": settings({}) + frame(Kind.RST_STREAM, (7).to_bytes(4, "big"), stream=1),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_a_stream_that_was_never_processed_is_opened_again_at_once(refusal: bytes) -> None:
    async def serve(accepted: Accepted, number: int) -> None:
        if number == 1:
            accepted.send(refusal)
            await accepted.closed()
        await accepted.open()
        await accepted.answer_all()

    async with scripted(serve) as port, patient(port) as client:
        assert await client.call(ECHO, b"x") == b"x"


async def test_calls_in_a_message_that_was_not_written_in_whole_were_not_sent() -> None:
    """The server's window has room for the beginning of the second message only."""

    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.call()
        await asyncio.sleep(0)
        accepted.send(frame(Kind.RST_STREAM, (2).to_bytes(4, "big"), stream=1))
        await accepted.closed()

    async with scripted(serve) as port, patient(port) as client:
        await client.wait_ready()
        written, unwritten = Received(), Received()
        client.start(ECHO, b"x" * 30_000, written)
        await asyncio.sleep(0)
        client.start(ECHO, b"x" * 60_000, unwritten)
        await until(lambda: written.outcomes == unwritten.outcomes == 1, 60)
        assert isinstance(written.errors[0], OutcomeUnknown)
        assert isinstance(unwritten.errors[0], NotSent)


async def test_a_server_that_never_answers_fails_calls_at_once_after_the_first_attempt() -> None:
    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.closed()

    async with scripted(serve) as port, connected(port, heartbeat_timeout_seconds=1.2) as client:
        await until(lambda: client.counts.ended["silent"] == 1, 60)
        for _ in range(3):
            with pytest.raises(NotSent, match="no answer"):
                await client.call(ECHO, b"x", time_left=600.0)


HOSTILE = {
    "a status of 5,000 digits": ended("1" * 5_000),
    "a reset of 16,384 bytes": frame(Kind.RST_STREAM, b"\xff" * 16_384, stream=1),
    "a message that is not text": ended("13", "%ff%"),
    "garbage": b"\xff" * 1_000,
    "headers that do not end": headers((":status", "200")),
    "pings": frame(Kind.PING, bytes(8)) * 100_000,
    "settings": settings({}) * 100_000,
    "empty data": data(b"") * 100_000,
    "priorities": frame(Kind.PRIORITY, bytes(5), stream=1) * 100_000,
    "unknown frames": frame(Kind.PRIORITY, bytes(5), stream=1).replace(b"\x02", b"\x99") * 100_000,
    "window updates": window_update(0, 1) * 100_000,
    "empty messages": data(bytes(5) * 3_000) * 1_000,
    "pongs that nobody asked for": data(
        b"".join(bytes([0, 0, 0, 0, 2]) + OpenCallStreamResponse(pong=1).SerializeToString() for _ in range(2_000))
    )
    * 100,
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_server_ends_its_stream_and_nothing_else(sent: bytes) -> None:
    """The client tries again, and says once what the server did."""

    async def serve(accepted: Accepted, number: int) -> None:
        await accepted.open()
        if number < 4:
            await accepted.call()
            accepted.send(sent)
            await accepted.closed()
        await accepted.answer_all()

    async with scripted(serve) as port, patient(port) as client:
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await client.wait_ready()
                with pytest.raises(OutcomeUnknown):
                    await client.call(ECHO, b"x")
            await client.wait_ready()
            assert await client.call(ECHO, b"x") == b"x"
        assert client.counts.opened == 4
        assert len([entry for entry in logs if entry["event"] == "call_stream.violated"]) <= 1


async def test_a_defect_in_reading_ends_the_stream_and_not_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.answer_all()

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async with scripted(serve) as port, patient(port) as client:
        await client.wait_ready()
        with monkeypatch.context() as defect:
            defect.setattr(client_stream, "read_responses", fail)
            with structlog.testing.capture_logs() as logs, pytest.raises(OutcomeUnknown, match="ZeroDivisionError"):
                await client.call(ECHO, b"x")
        await asyncio.wait_for(client.wait_ready(), 60)
        assert await client.call(ECHO, b"x") == b"x"
        assert client.counts.ended["failed"] == 1
        (violated,) = [entry for entry in logs if entry["event"] == "call_stream.violated"]
        assert isinstance(violated["exc_info"], ZeroDivisionError)


async def test_metadata_that_cannot_be_read_fails_the_attempt_only() -> None:
    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.answer_all()

    readable = False

    def metadata() -> tuple[tuple[str, str], ...]:
        if not readable:
            raise OSError("no such token")
        return ()

    async with scripted(serve) as port, patient(port, metadata=metadata) as client:
        with pytest.raises(NotSent, match="no such token"):
            await client.call(ECHO, b"x")
        readable = True
        await asyncio.wait_for(client.wait_ready(), 60)


async def test_one_address_that_is_silent_does_not_use_up_the_time_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.answer_all()

    async def silent(accepted: Accepted, _number: int) -> None:
        await accepted.closed()

    async with scripted(serve) as port, asyncio.timeout(60):

        async def resolved(_host: str, _port: int) -> list[str]:
            return ["127.0.0.2", "127.0.0.1"]

        monkeypatch.setattr(connection, "addresses_of", resolved)
        frozen = await asyncio.start_server(lambda *_: None, "127.0.0.2", port)
        async with frozen:
            client = CallStreamClient(f"worker:{port}", client_name="tester", ends_when_silent=False)
            running = asyncio.create_task(client.run())
            assert await client.call(ECHO, b"x") == b"x"
            assert not client.counts.ended
            running.cancel()
            await asyncio.wait([running])
