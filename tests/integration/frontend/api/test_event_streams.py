"""Streams over real connections: framing for every kind of client, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.frontend.access.request_admission import OverloadBounds, OverloadLimits, RequestAdmission
from kvrouter.frontend.generate_request import GenerateRequest
from kvrouter.frontend.http_api import HttpApi
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.conversation_ids import ConversationIds
from kvrouter.frontend.request.progress import OutputReceiver
from kvrouter.frontend.request.request_checks import Limits
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.service import FrontendService
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.frontend.text.client_work import ClientWork
from kvrouter.frontend.workers.output import DetailedOutput
from kvrouter.runtime.http_server import HttpLimits, serving_http
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.errors import KvRouterError, TooLarge
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput
from prometheus_client import CollectorRegistry

PIECE = DetailedOutput(1000, list(range(100_000, 101_000)))
LAST = DetailedOutput.of(GenerateOutput(token_ids=[7], finish_reason=FinishReason.FINISH_REASON_LENGTH))
DONE = b"data: [DONE]\n\n"


class Engine:
    """A FrontendService that sends so many pieces of 1,000 tokens, and a last one."""

    settings = FrontendSettings(http_body_seconds=10)
    limits = Limits(1000, 1 << 30)
    texts = SimpleNamespace(work=ClientWork(CollectorRegistry()))
    models = SimpleNamespace(may_forward=False, has_text=lambda _: False, texts=texts)
    access = None
    choices = SimpleNamespace(rules={})
    metrics = FrontendMetrics(CollectorRegistry())
    conversations = ConversationIds((), metrics.ignored_sessions)
    admission = RequestAdmission(None, OverloadBounds(OverloadLimits(0, 0, 0.0), CollectorRegistry()))

    def __init__(self) -> None:
        self.runner = self
        self.errors: list[KvRouterError] = []
        self.pieces_sent = 0

    async def run(self, request: GenerateRequest, prompt: bytes, receiver: OutputReceiver) -> None:
        receiver.routed(Routed(request_id="r", rank=Rank(worker_id=1)))
        try:
            for _ in range(request.stop.max_tokens // 1000):
                receiver.output(PIECE)
                self.pieces_sent += 1
                await asyncio.sleep(0)
            receiver.output(LAST)
        except KvRouterError as error:
            self.errors.append(error)
            raise


class Served:
    def __init__(self, engine: Engine, port: int) -> None:
        self.engine = engine
        self.port = port

    async def send(
        self, tokens: int, *, version: str = "1.1", headers: str = ""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request(tokens, version=version, headers=headers))
        return reader, writer


def request(tokens: int, *, version: str = "1.1", headers: str = "") -> bytes:
    body = json.dumps({"model": "m", "prompt": [1], "max_tokens": tokens, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    engine, registry = Engine(), CollectorRegistry()
    api = HttpApi(cast(FrontendService, engine), registry)
    limits = HttpLimits(100, 10)
    options: Any = {"handler_cancellation": True, "auto_decompress": False, "shutdown_timeout": 0.1}
    async with serving_http(api.application(), "127.0.0.1", 0, limits, registry, name="test", **options) as (_, port):
        yield Served(engine, port)


async def read_chunked(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Returns head and body of one response."""
    head = await reader.readuntil(b"\r\n\r\n")
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    assert await reader.readline() == b"\r\n"
    return head, body


def tokens_of(body: bytes) -> int:
    events = [event.removeprefix(b"data: ") for event in body.split(b"\n\n") if event]
    assert events.pop() == b"[DONE]"
    return sum(len(choice["token_ids"]) for event in events for choice in json.loads(event)["choices"])


async def test_requests_that_follow_each_other_on_a_connection_are_answered_in_order(served: Served) -> None:
    reader, writer = await served.send(2000)
    writer.write(request(1) + request(3000))
    for expected in (2001, 1, 3001):
        head, body = await read_chunked(reader)
        assert b"Transfer-Encoding: chunked\r\n" in head
        assert tokens_of(body) == expected
    writer.close()


async def test_the_connection_is_closed_for_a_client_that_wants_it(served: Served) -> None:
    reader, writer = await served.send(2000, headers="Connection: close\r\n")
    head, body = await read_chunked(reader)
    assert b"Connection: close\r\n" in head
    assert tokens_of(body) == 2001
    assert await reader.read() == b""
    writer.close()


async def test_a_client_of_http_1_0_reads_to_the_end_of_the_connection(served: Served) -> None:
    reader, writer = await served.send(2000, version="1.0", headers="Connection: keep-alive\r\n")
    head, body = (await reader.read()).split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.0 200 OK")
    assert b"chunked" not in head
    assert tokens_of(body) == 2001
    writer.close()


async def test_a_client_that_does_not_read_fails_alone_and_takes_bounded_memory(served: Served) -> None:
    silent, silent_writer = await served.send(5_000_000)
    tracemalloc.start()
    try:
        async with asyncio.timeout(60):
            while not served.engine.errors:
                await asyncio.sleep(0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(served.engine.errors[0], TooLarge)
    assert served.engine.pieces_sent * 7000 < 32 << 20, "it ended before it had produced 32 MB"
    assert peak < 8 << 20
    reader, writer = await served.send(1000)
    _, body = await read_chunked(reader)
    assert tokens_of(body) == 1001
    received = await silent.read()
    assert b"the client has not read" in received
    assert DONE not in received
    for each in (silent_writer, writer):
        each.close()
