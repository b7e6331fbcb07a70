"""Chunks that pass as the engine wrote them reach the client, and are counted, as those that pass piece by piece."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import pytest
from aiohttp import HttpVersion10, HttpVersion11, web
from hypothesis import given, strategies as st
from kvrouter.core import OutputWriter
from kvrouter.engines.fields import CHATS
from kvrouter.frontend.edge.event_stream import StepWriter
from kvrouter.frontend.generate_request import StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.proxy.engine_exchange import EngineConnection
from kvrouter.frontend.proxy.engine_origin import Origin
from kvrouter.frontend.proxy.forwarded_response import ForwardedResponse
from kvrouter.frontend.proxy.forwarding import EngineCalls
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.request.progress import Progress
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.attempt import Dispatch, WorkerAttempt
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from prometheus_client import CollectorRegistry

from ..request.test_written_tokens import Connection, Link

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":null}\n\n'
USAGE = b'data: {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
INTERNAL = b'data: {"kv_transfer_params":{"remote_host":"10.0.0.1"}}\n\n'
EVENTS = [
    TOKEN,
    TOKEN,
    TOKEN,
    TOKEN * 2,
    USAGE,
    INTERNAL,
    b"event: x\ndata: {}\n\n",
    b": comment\n\n",
    b"data: {}\r\n\r\n",
    b"data: {}\r\n\n\n",
]
LIMIT = 1 << 32
_CUT = st.tuples(st.just("cut"), st.integers(1, 60))
_ACTS = st.sampled_from([("act", each) for each in ("step", "pause", "resume", "missed", "answered")])
_STEPS = st.lists(
    st.tuples(st.sampled_from(["event", "event", "hold"]), st.sampled_from(EVENTS)) | _CUT | _ACTS, max_size=40
)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Case:
    """A forwarded stream, whose engine is played by hand."""

    def __init__(self, *, has_writer: bool = True, has_key: bool = False, version: Any = HttpVersion11) -> None:
        self._has_writer = has_writer
        self.client, self.link = Connection(), Link()
        self.metrics = FrontendMetrics(CollectorRegistry())
        self.latency = self.metrics.models.of("m").token_latency
        request = SimpleNamespace(
            version=version, keep_alive=True, protocol=self.client, writer=self.client, path="/", headers={}
        )
        http = cast(web.Request, Mock(wraps=request, **vars(request)))
        self.response = ForwardedResponse(http, StepWriter(), RoutedOn.ROUTED_ON_TEXT)
        runner = Mock()
        self.calls = EngineCalls(http, self.response, b"", Mock(runner=runner), RoutedBody("m"), CHATS, has_key)
        self.progress = Progress(
            LiveBooking.of(BookingKey(request_id="r"), SelectWorkerResponse(), b"", 4, 4),
            cast(SchedulerLink, self.link),
            self.response,
            self.metrics.models.of("m"),
            since_ns=0,
        )
        self.written = 0
        dispatch = Dispatch(
            1,
            "w:1",
            WorkerRequest(request_id="r", stop=StopRules(LIMIT)),
            b"",
            self._on_output,
            Deadline.never(),
            lambda _: False,
            on_written=self._on_written,
        )
        self.call = WorkerHealth(BackOff(), max_missed=2).begin("w:1", 1)
        self.attempt = WorkerAttempt(dispatch, self.call, self.metrics)
        self.engine = EngineConnection(Origin.of("http://127.0.0.1"))
        self.engine.connection_made(Mock(asyncio.Transport, is_closing=lambda: False))
        self._kept = b""

    def _on_output(self, output: Output) -> OutputWriter | None:
        writer = self.progress.pass_on(output)
        return writer if self._has_writer else None

    def _on_written(self, tokens: int, token_ids: bytes, last_ns: int) -> None:
        self.written += tokens
        self.progress.written(tokens, token_ids, last_ns)

    async def begin(self) -> None:
        """Sends the head, and the first token."""
        answered = self.engine.exchange(b"", b"", None)
        self.engine.data_received(HEAD)
        answer = await answered
        loop = asyncio.get_running_loop()
        self.attempt.start(lambda receiver: loop.create_task(self.calls._pass_on(answer, receiver)))
        self.engine.data_received(chunk(TOKEN))
        for _ in range(3):
            await asyncio.sleep(0)

    async def run(self, steps: list[tuple[str, Any]]) -> None:
        """Sends events, each as a chunk. ``hold`` keeps one until the next one is sent, ``cut`` its last bytes."""
        for kind, value in steps:
            if kind == "event":
                self.engine.data_received(self._kept + chunk(value))
                self._kept = b""
            elif kind == "hold":
                self._kept += chunk(value)
            elif kind == "cut":
                sent = self._kept + chunk(TOKEN)
                self._kept = sent[value:]
                self.engine.data_received(sent[:value])
            elif value == "step":
                await asyncio.sleep(0)
            elif value in ("pause", "resume"):
                self.client.pause(paused=value == "pause")
            else:
                self.call.worker.missed = int(value == "missed")

    async def end(self) -> None:
        """Ends the stream."""
        self.client.pause(paused=False)
        self.engine.data_received(self._kept + chunk(b"data: [DONE]\n\n") + chunk(b""))
        assert await self.attempt.ended is None
        await self.response.end()

    @property
    def body(self) -> bytes:
        """The body that the client got."""
        _, _, rest = self.client.written.partition(b"\r\n\r\n")
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body += rest[: int(size, 16)]
            assert rest[int(size, 16) :][:2] == b"\r\n"
            rest = rest[int(size, 16) + 2 :]
        return body


async def _outcome(case: _Case, steps: list[tuple[str, Any]]) -> object:
    """Returns all that can be seen of a stream."""
    await case.begin()
    await case.run(steps)
    await case.end()
    progress = case.progress
    counted = (progress.output_tokens, progress.cached_tokens, progress.is_whole)
    return case.body, case.link.reported, counted, case.call.worker.pieces, sum(case.latency.counts)


@given(_STEPS, st.booleans())
def test_chunks_pass_unchanged_as_pieces_do(steps: list[tuple[str, Any]], has_key: bool) -> None:
    async def outcome(*, has_writer: bool) -> object:
        return await _outcome(_Case(has_writer=has_writer, has_key=has_key), steps)

    written, piece_by_piece = (asyncio.run(outcome(has_writer=has_writer)) for has_writer in (True, False))
    assert written == piece_by_piece


async def written_by(case: _Case, *sent: bytes | tuple[str, Any]) -> int:
    """Returns how many tokens of these chunks passed as their engine wrote them, each in a step of its own."""
    steps = [("event", each) if isinstance(each, bytes) else each for each in sent]
    await case.begin()
    await case.run([each for step in steps for each in (step, ("act", "step"))])
    await case.end()
    return case.written


async def test_the_writer_takes_all_tokens_after_the_first_and_reports_each_block() -> None:
    case = _Case()
    assert await written_by(case, *[TOKEN] * 16) == 15
    assert len(case.link.reported) > 4
    assert case.body == TOKEN * 17 + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "unusual",
    [
        USAGE,
        b"data: {}\r\n\r\n",
        ("act", "pause"),
        ("act", "missed"),
        ("cut", 30),
    ],
)
async def test_whatever_is_unusual_passes_piece_by_piece(unusual: bytes | tuple[str, Any]) -> None:
    after = int(unusual == USAGE)  # The others leave no writer for the next piece.
    assert await written_by(_Case(), TOKEN, TOKEN, unusual, TOKEN) == 1 + after


async def test_a_read_that_ends_within_the_size_of_a_chunk_does_not_end_with_a_chunk() -> None:
    case, events = _Case(), b"data: 12\n\n" + b"\r\nb\r\ndata: xyz\n\n"
    assert chunk(events).startswith(b"1a\r\n"), "the rest of this chunk looks like two"
    await case.begin()
    await case.run([("event", TOKEN)])
    for read in (chunk(TOKEN) + b"1", chunk(events)[1:], chunk(TOKEN)):
        case.engine.data_received(read)
        await asyncio.sleep(0)
    assert case.body == TOKEN * 3 + events + TOKEN
    await case.end()


@pytest.mark.parametrize(
    ("settings", "event"),
    [
        ({"has_writer": False}, TOKEN),
        ({"version": HttpVersion10}, TOKEN),
        ({}, USAGE),
        ({"has_key": True}, INTERNAL),
    ],
)
async def test_a_read_that_no_writer_takes_is_charged_once(settings: dict[str, Any], event: bytes) -> None:
    case, spent = _Case(**settings), []
    await case.begin()
    take = case.engine._budget.take
    with patch.object(case.engine._budget, "take", lambda cost: spent.append(cost) or take(cost)):
        for _ in range(10):
            case.engine.data_received(chunk(event))
            await asyncio.sleep(0)
    assert sum(spent) == 10 * (60 + len(chunk(event)) // 50)
    await case.end()


async def test_a_client_without_chunks_gets_the_events() -> None:
    case = _Case(version=HttpVersion10)
    assert await written_by(case, *[TOKEN] * 4) == 0
    assert case.client.written.partition(b"\r\n\r\n")[2] == TOKEN * 5 + b"data: [DONE]\n\n"


async def test_a_client_with_a_key_sees_no_internal_field() -> None:
    case = _Case(has_key=True)
    assert await written_by(case, TOKEN, TOKEN, INTERNAL, TOKEN, TOKEN) == 3
    assert case.body.count(b'"kv_transfer_params":null') == 1
    assert b"10.0.0.1" not in case.body
