"""Connections to engines: which are used again, how bodies end, and what ends an exchange early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop
from kvrouter.devtools.system.ports import free_port
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.proxy.engine_connections import EngineConnections
from kvrouter.frontend.proxy.engine_exchange import EngineAnswer, EngineConnection, EngineFailed
from kvrouter.frontend.proxy.engine_origin import Origin
from kvrouter.net.budgets import LoopBudget
from kvrouter.net.calls import NotSent
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway
from multidict import CIMultiDict

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"Content-Length: 2\r\n\r\nhi"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
HERE = Origin.of("http://127.0.0.1")
Run = Callable[[Coroutine[Any, Any, None]], None]
Write = Callable[[bytes], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = asyncio.run if request.param == "asyncio" else uvloop.run
    return chosen


class Engine:
    """A server that answers each request on a connection with the next of some bytes; None closes the connection."""

    def __init__(self, answers: Sequence[bytes | None]) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()
        """Set when a client has closed a connection."""
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await self._head(reader):
                size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(size))
                answer = self.answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                if b"close\r\n" in answer:
                    break
        finally:
            writer.close()
            self.closed.set()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return b""


@asynccontextmanager
async def engine(*answers: bytes | None) -> AsyncIterator[tuple[Engine, EngineConnections]]:
    served = Engine(answers)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        with closing(EngineConnections()) as connections:
            yield served, connections


async def post(
    connections: EngineConnections, served: Engine, *, data: bytes = b"{}", seconds: float | None = 30, **headers: str
) -> EngineAnswer:
    return await connections.post(served.url, "/v1/chat", data=data, headers=headers, seconds=seconds)


async def body_of(connections: EngineConnections, answer: EngineAnswer) -> bytes:
    body = b""
    try:
        while part := await answer.part():
            body += part
        return body
    finally:
        connections.end(answer)


@pytest.mark.parametrize("answer", [SIZED, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED])
async def test_a_connection_serves_one_request_after_another(answer: bytes) -> None:
    async with engine(answer, answer, answer) as (served, connections):
        for _ in range(3):
            assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 1


async def test_urls_of_a_server_share_its_connections() -> None:
    async with engine(SIZED, SIZED, SIZED) as (served, connections):
        assert await body_of(connections, await post(connections, served)) == b"hi"
        served.url += "/"
        assert await body_of(connections, await post(connections, served)) == b"hi"
        Origin.of.cache_clear()
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 1


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with engine(SIZED, SIZED) as (served, connections):
        answers = await asyncio.gather(*(post(connections, served) for _ in range(2)))
        assert [await body_of(connections, answer) for answer in answers] == [b"hi", b"hi"]
        assert served.connections == 2


async def test_a_response_without_a_length_ends_with_its_connection() -> None:
    async with engine(OK + b"Connection: close\r\n\r\nhi", SIZED) as (served, connections):
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 2


async def test_the_request_has_the_headers_and_the_body_unchanged() -> None:
    async with engine(SIZED) as (served, connections):
        await body_of(connections, await post(connections, served, data=b'{"a": 1}', accept="x", note="ünï"))
        head, _, body = served.requests[0].partition(b"\r\n\r\n")
        assert body == b'{"a": 1}'
        host = served.url.removeprefix("http://").encode()
        lines = [b"POST /v1/chat HTTP/1.1", b"Host: " + host, b"accept: x", "note: ünï".encode(), b"Content-Length: 8"]
        assert head.split(b"\r\n") == lines


async def test_a_login_in_the_url_is_sent_unless_the_request_has_one() -> None:
    async with engine(SIZED, SIZED) as (served, connections):
        url = served.url.replace("http://", "http://me:se%20cret@")
        for headers in ({}, {"authorization": "Bearer key"}):
            answer = await connections.post(url, "/", data=b"", headers=headers, seconds=None)
            assert await body_of(connections, answer) == b"hi"
        assert [b"Basic bWU6c2UgY3JldA==" in request for request in served.requests] == [True, False]
        assert b"@" not in served.requests[0]


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/", {"a": "b\r\nc: d"}),
        ("/", {"a": "b\nc: d"}),
        ("/", {"a\r\nb": "c"}),
        ("/ HTTP/1.1\r\n\r\nGET /", {}),
        ("/ x", {}),
    ],
)
async def test_nothing_can_begin_another_request(path: str, headers: dict[str, str]) -> None:
    with closing(EngineConnections()) as connections, pytest.raises(ValueError, match="line breaks"):
        await connections.post("http://127.0.0.1:1", path, data=b"", headers=headers, seconds=None)


async def test_an_engine_that_refuses_connections_got_nothing() -> None:
    port = free_port()
    with closing(EngineConnections()) as connections:
        with pytest.raises(NotSent, match=f"connection refused at 127.0.0.1:{port}"):
            await connections.post(f"http://127.0.0.1:{port}", "/", data=b"", headers={}, seconds=None)
        with pytest.raises(NotSent, match="expected a URL"):
            await connections.post("127.0.0.1:1", "/", data=b"", headers={}, seconds=None)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (None, "closed without a response"),
        (OK + b"Content-Length: 9\r\nConnection: close\r\n\r\nhi", "closed within a response"),
        (OK + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\nhi\r\n", "closed within a response"),
    ],
)
async def test_a_broken_connection_is_a_failure_of_the_engine(answer: bytes | None, error: str) -> None:
    async with engine(answer) as (served, connections):
        with pytest.raises(EngineFailed, match=error):
            await body_of(connections, await post(connections, served))


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n\r\n", OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nhi"]
)
async def test_a_response_that_is_not_http_is_refused(answer: bytes) -> None:
    async with engine(answer) as (served, connections):
        with pytest.raises(DependencyAway, match="does not answer"):
            await body_of(connections, await post(connections, served))
        await served.closed.wait()


async def test_headers_have_a_limit() -> None:
    endless = OK + b"".join(b"x-%d: %b\r\n" % (number, b"y" * 1000) for number in range(80))
    async with engine(endless) as (served, connections):
        with pytest.raises(DependencyAway, match="headers of more than 65536 bytes"):
            await post(connections, served)


@pytest.mark.parametrize("answer", [b"", OK + b"Content-Length: 9\r\n\r\nhi"])
async def test_a_response_that_is_late_ends_with_the_deadline(answer: bytes) -> None:
    async with engine(answer) as (served, connections):
        with pytest.raises(DeadlineExceeded):
            await body_of(connections, await post(connections, served, seconds=0.05))
        await served.closed.wait()


@pytest.mark.parametrize("before", [0.05, 30])
def test_each_exchange_of_a_connection_has_its_own_deadline(run: Run, before: float) -> None:
    async def exchange() -> None:
        async with engine(SIZED, b"") as (served, connections):
            assert await body_of(connections, await post(connections, served, seconds=before)) == b"hi"
            with pytest.raises(DeadlineExceeded):
                await post(connections, served, seconds=0.1)
            assert served.connections == 1

    run(exchange())


def test_a_time_too_short_for_a_timer_is_over_at_once(run: Run) -> None:
    async def exchange() -> None:
        connection = EngineConnection(HERE)
        connection.connection_made(Mock(asyncio.Transport))
        answered = connection.exchange(b"", b"", 0.0004)
        assert answered.done()
        assert isinstance(answered.exception(), DeadlineExceeded)
        assert not connection.end()

    run(exchange())


def test_an_exchange_that_ends_just_in_time_leaves_the_next_one_alone(run: Run) -> None:
    async def exchange() -> None:
        loop = asyncio.get_running_loop()
        connection = EngineConnection(HERE)
        connection.connection_made(Mock(asyncio.Transport))
        for _ in range(10):
            answered = connection.exchange(b"", b"", 0.0024)
            due = loop.time() + 0.002  # The timer of a loop with whole milliseconds.
            while loop.time() < due:
                await asyncio.sleep(0)
            connection.data_received(SIZED)
            assert connection.end() is (answered.exception() is None)
        answered = connection.exchange(b"", b"", 30)
        connection.data_received(SIZED)
        assert (await answered).status == 200
        assert connection.end()

    run(exchange())


async def test_a_response_nobody_reads_to_its_end_ends_the_connection() -> None:
    async with engine(OK + b"Content-Length: 9\r\n\r\nhi", SIZED) as (served, connections):
        answer = await post(connections, served)
        assert await answer.part() == b"hi"
        connections.end(answer)
        await served.closed.wait()
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 2


async def test_a_response_is_ended_once() -> None:
    async with engine(SIZED, SIZED) as (served, connections):
        answer = await post(connections, served)
        assert await body_of(connections, answer) == b"hi"
        with pytest.raises(RuntimeError, match="was ended before"):
            connections.end(answer)
        running = await post(connections, served)
        with pytest.raises(RuntimeError, match="was ended before"):
            connections.end(answer)
        assert await body_of(connections, running) == b"hi"
        assert served.connections == 1


async def test_a_cancelled_request_ends_the_connection() -> None:
    async with engine(b"") as (served, connections):
        asking = asyncio.create_task(post(connections, served))
        while not served.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        await served.closed.wait()


@pytest.mark.parametrize("more", [SIZED, b"HTTP", b"\0"])
async def test_bytes_that_nobody_has_asked_for_end_the_connection(more: bytes) -> None:
    async with engine(SIZED + more, SIZED) as (served, connections):
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 2


async def test_what_nobody_takes_stays_in_the_socket() -> None:
    body = b"x" * (32 << 20)
    async with engine(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body, SIZED) as (served, connections):
        answer = await post(connections, served)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert len(await answer.part()) < 1 << 20
        rest = await body_of(connections, answer)
        assert len(body) - (1 << 20) < len(rest) < len(body)
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 1


async def test_a_connection_the_engine_ends_is_not_used_again() -> None:
    async with engine(SIZED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), SIZED) as (served, connections):
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert await body_of(connections, await post(connections, served)) == b"hi"
        assert served.connections == 2


class Reader(EventStream):
    """A client, which may leave output unread."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()

    @property
    def is_full(self) -> bool:
        return not self.reads.is_set()

    async def drain(self) -> None:
        await self.reads.wait()


def arrive(answer: EngineAnswer, part: bytes) -> None:
    answer.unread.append(part)
    answer.arrived(len(part))


async def until(is_done: Callable[[], bool]) -> None:
    while not is_done():
        await asyncio.sleep(0)


async def test_parts_pass_in_the_step_in_which_they_arrive_while_the_client_reads() -> None:
    answer, client = EngineAnswer(200, "OK", CIMultiDict(), [], EngineConnection(HERE), LoopBudget()), Reader()
    taken: list[bytes] = []
    passing = asyncio.create_task(answer.pass_on(taken.append, client))
    arrive(answer, b"1")
    await until(lambda: len(taken) == 1)
    await asyncio.sleep(0)
    arrive(answer, b"2")
    assert taken == [b"1", b"2"]
    client.reads.clear()
    arrive(answer, b"3")
    await until(lambda: len(taken) == 3)  # The task takes it, and waits for the client.
    arrive(answer, b"4")
    arrive(answer, b"5")
    await asyncio.sleep(0)
    assert taken == [b"1", b"2", b"3"]
    client.reads.set()
    answer.end()
    await passing
    assert taken == [b"1", b"2", b"3", b"45"]


async def test_an_error_of_the_receiver_ends_the_passing() -> None:
    answer = EngineAnswer(200, "OK", CIMultiDict(), [], EngineConnection(HERE), LoopBudget())
    taken: list[bytes] = []

    def take(part: bytes) -> None:
        taken.append(part)
        if len(taken) == 2:
            raise DependencyAway("it is no chat")

    passing = asyncio.create_task(answer.pass_on(take, None))
    arrive(answer, b"1")
    await until(lambda: len(taken) == 1)
    await asyncio.sleep(0)
    arrive(answer, b"2")
    with pytest.raises(DependencyAway):
        await passing
