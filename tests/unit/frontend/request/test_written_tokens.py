"""Output that a token writer takes reaches the client, and is counted and kept, as that which passes piece by piece."""

from __future__ import annotations

import asyncio
import json
from array import array
from itertools import groupby
from random import Random
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import HttpVersion11, web
from hypothesis import given, strategies as st
from kvrouter.core import OutputWriter
from kvrouter.frontend.edge.completion_request import parse_completion
from kvrouter.frontend.edge.event_stream import EventStream, StepWriter
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.text_responses import CompletionStream
from kvrouter.frontend.generate_request import StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request.progress import KeptOutput, Progress
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.schedulers.booking_updates import BookingUpdates, LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.attempt import Dispatch, RunningCall, WorkerAttempt
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.output import Output
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.calls_pb2 import OpenCallStreamResponse
from kvrouter.v1.common_pb2 import BookingKey, Rank
from kvrouter.v1.errors import DependencyAway
from kvrouter.v1.scheduler_pb2 import SelectWorkerResponse
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse
from prometheus_client import CollectorRegistry

from ...net.calls.linked import TOKENS, Linked


def single(token_id: int) -> GenerateOutput:
    return GenerateOutput(token_ids=[token_id])


_FIELDS = {"model": "m", "prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}}
LENGTH = FinishReason.FINISH_REASON_LENGTH
_TOKENS = st.integers(0, (1 << 32) - 1)
_SINGLES = st.builds(single, _TOKENS)
_PIECES = st.one_of(
    *[_SINGLES] * 6,
    st.builds(
        GenerateOutput,
        token_ids=st.lists(_TOKENS, max_size=3),
        cached_tokens=st.none() | st.integers(0, 1),
        text=st.sampled_from(["", "x"]),
        finish_reason=st.sampled_from([0, 0, 0, LENGTH]),
    ),
)
_EVENTS = st.sampled_from(["step", "pause", "resume", "missed", "answered", "migrate"])
_STEPS = st.lists(_PIECES | _EVENTS, max_size=60)
_ENDS = st.sampled_from(["end", "error", "cancel"])
_RETURNS = st.sampled_from([None, True, False])


class Link:
    def __init__(self) -> None:
        self.updates = BookingUpdates("s", "c")
        self.reported: list[int] = []

    def prefill_complete(self, _: LiveBooking, *, handover_us: int | None) -> None:
        self.reported.append(0)

    def report_output(self, booking: LiveBooking, output_tokens: int) -> None:
        assert output_tokens > booking.room
        self.updates.report_output(booking, output_tokens)
        self.reported.append(output_tokens)


class Connection(asyncio.Transport):
    """A connection whose client reads, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writing_paused = False
        self.transport = self
        self.reads = asyncio.Event()

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    async def drain(self) -> None:
        await self.reads.wait()

    def pause(self, *, paused: bool) -> None:
        self.writing_paused = paused
        (self.reads.clear if paused else self.reads.set)()


class _Case:
    """A streamed request, whose attempts are driven by hand."""

    def __init__(self, prompt: int, limit: int, *, has_writer: bool = True, returns: bool | None = None) -> None:
        self._prompt, self._limit, self._has_writer = prompt, limit, has_writer
        self.connection, self.link = Connection(), Link()
        self.metrics = FrontendMetrics(CollectorRegistry())
        self.model = self.metrics.models.of("m")
        body = json.dumps(_FIELDS if returns is None else _FIELDS | {"return_token_ids": returns}).encode()
        request = parse_completion(body, max_prompt_tokens=100)
        assert request.plain_prompt is not None
        frame = ResponseFrame(request, None, [request.plain_prompt.token_ids])
        frame._created = 0
        connection = self.connection
        http = SimpleNamespace(version=HttpVersion11, keep_alive=True, protocol=connection, writer=connection)
        self.client = CompletionStream(frame, EventStream(cast(web.Request, http), StepWriter(), headers={}))
        self.kept = KeptOutput()
        self.attempts: list[Progress] = []
        self.taken: list[int] = []
        """How many tokens a token writer has taken at a time."""
        self.workers = WorkerHealth(BackOff(), max_missed=2)
        self.begin()

    @property
    def output_tokens(self) -> int:
        return sum(progress.output_tokens for progress in self.attempts)

    def begin(self) -> None:
        """Begins an attempt."""
        number = len(self.attempts)
        self.client.routed(Routed(request_id="r", rank=Rank(worker_id=number), migrations=number))
        key, prompt = BookingKey(request_id="r", attempt=number), self._prompt + self.output_tokens
        self.progress = Progress(
            LiveBooking.of(key, SelectWorkerResponse(), b"", prompt, 4),
            cast(SchedulerLink, self.link),
            self.client,
            self.model,
            since_ns=0,
            kept=self.kept,
            continues=number > 0,
        )
        dispatch = Dispatch(
            number,
            "w:1",
            WorkerRequest(request_id="r", stop=StopRules(self._limit - self.output_tokens)),
            b"",
            self._on_output,
            Deadline.never(),
            lambda _: False,
            on_written=self._on_written,
        )
        self.call = self.workers.begin("w:1", number)
        self.attempt = WorkerAttempt(dispatch, self.call, self.metrics)
        self.attempts.append(self.progress)
        self.attempt.start(self.start)

    def start(self, _: WorkerAttempt) -> RunningCall:
        """Makes the call of an attempt."""
        return SimpleNamespace(cancel=lambda: None)

    def receive(self, pieces: list[bytes]) -> None:
        """Takes encoded pieces, which arrive one after the other."""
        for piece in pieces:
            self.attempt.on_response(piece)

    def _on_output(self, output: Output) -> OutputWriter | None:
        writer = self.progress.pass_on(output)
        return writer if self._has_writer else None

    def _on_written(self, tokens: int, token_ids: bytes, last_ns: int) -> None:
        assert self._has_writer
        self.taken.append(tokens)
        self.progress.written(tokens, token_ids, last_ns)

    async def run(self, steps: list[GenerateOutput | str]) -> None:
        """Takes steps, until the request has no further attempt."""
        for step, group in groupby(steps, lambda step: "pieces" if isinstance(step, GenerateOutput) else step):
            if step == "pieces":
                outputs = [cast(GenerateOutput, each) for each in group]
                self.receive([WorkerServiceGenerateResponse(output=each).SerializeToString() for each in outputs])
            elif step == "step":
                await asyncio.sleep(0)
            elif step in ("pause", "resume"):
                self.connection.pause(paused=step == "pause")
            elif step == "migrate":
                self.attempt.on_error(DependencyAway("x"))
                if not isinstance(self.attempt.ended.result(), WorkerFailure):
                    return
                self.begin()
            else:
                self.call.worker.missed = int(step == "missed")

    async def end(self, how: str) -> None:
        """Ends the attempt, and the response."""
        attempt = self.attempt
        {"end": attempt.on_end, "cancel": attempt.cancel, "error": lambda: attempt.on_error(DependencyAway("x"))}[how]()
        self.connection.pause(paused=False)
        await self.client.end()

    @property
    def events(self) -> bytes:
        """What is written after the head, which has the time."""
        return self.connection.written.partition(b"\r\n\r\n")[2]

    @property
    def chunks(self) -> list[Any]:
        lines = [line.removeprefix(b"data: ") for line in self.events.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]


class _Streamed(_Case):
    """A request whose pieces arrive on a call stream: one in each read, or in messages and reads that vary."""

    def __init__(self, prompt: int, limit: int, *, has_writer: bool, varies: Random | None) -> None:
        self._varies = varies
        super().__init__(prompt, limit, has_writer=has_writer, returns=True)

    def start(self, receiver: WorkerAttempt) -> RunningCall:
        self.linked, self._is_draining = Linked(), False
        running = self.linked.client.start(TOKENS, b"", receiver)
        self.linked.send()
        return running

    def receive(self, pieces: list[bytes]) -> None:
        while pieces:
            read = [self._message(pieces)]
            while pieces and self._does(0.5):
                read.append(self._message(pieces))
            self.linked.client.receive(read)

    def _message(self, pieces: list[bytes]) -> bytes:
        """Takes the first pieces, and returns a message with them."""
        message = OpenCallStreamResponse()
        while not message.whole_responses or (pieces and self._does(0.3)):
            message.whole_numbers.append(1)
            message.whole_responses.append(pieces.pop(0))
        if pieces and self._does(0.2):
            message.responses.add(number=1, response=pieces.pop(0))
        if self._does(0.1):
            message.pong = 1
        if not self._is_draining and self._does(0.1):
            self._is_draining = True
            message.draining.last_call = 1
        return message.SerializeToString()

    def _does(self, probability: float) -> bool:
        return self._varies is not None and self._varies.random() < probability


async def _outcome(case: _Case, steps: list[GenerateOutput | str], end: str) -> object:
    """Returns all that can be seen of a request with these pieces of output."""
    await case.run(steps)
    await case.end(end)
    return (
        type(case.attempt.ended.result()),
        case.events,
        case.link.reported,
        case.kept.packed(),
        [(progress.output_tokens, progress.is_whole) for progress in case.attempts],
        case.call.worker.pieces,
        sum(case.model.token_latency.counts),
        case.model.output_tokens.value,
    )


@given(st.integers(1, 9), st.integers(1, 40), _RETURNS, _STEPS, _ENDS)
def test_output_of_a_token_writer_is_as_that_which_passes_piece_by_piece(
    prompt: int, limit: int, returns: bool | None, steps: list[GenerateOutput | str], end: str
) -> None:
    async def outcome(*, has_writer: bool) -> object:
        return await _outcome(_Case(prompt, limit, has_writer=has_writer, returns=returns), steps, end)

    written, one_by_one = (asyncio.run(outcome(has_writer=has_writer)) for has_writer in (True, False))
    assert written == one_by_one


@given(st.integers(1, 9), st.integers(1, 40), st.randoms(use_true_random=False), _STEPS, _ENDS)
def test_output_is_the_same_in_whichever_messages_it_arrives(
    prompt: int, limit: int, varies: Random, steps: list[GenerateOutput | str], end: str
) -> None:
    async def outcome(*, has_writer: bool) -> object:
        case = _Streamed(prompt, limit, has_writer=has_writer, varies=varies if has_writer else None)
        return await _outcome(case, steps, end)

    written, one_by_one = (asyncio.run(outcome(has_writer=has_writer)) for has_writer in (True, False))
    assert written == one_by_one


async def test_a_token_writer_takes_all_tokens_but_the_first_and_reports_each_block() -> None:
    case = _Case(4, 100)
    for token in range(1, 17):
        await case.run([single(7)])
        assert case.link.reported[1:] == [*range(1, token + 1, 4)], "the tokens that need a block, at once"
    await case.end("end")
    assert case.taken == [15]
    assert case.model.output_tokens.value == 13, "as of the last report"


async def test_a_request_that_migrates_after_a_token_writer_took_tokens_goes_on_where_it_was() -> None:
    case = _Case(4, 100)
    await case.run([*map(single, range(7)), "migrate", *map(single, range(7, 18))])
    await case.end("end")
    assert [progress.output_tokens for progress in case.attempts] == [7, 11]
    assert case.taken == [6, 10]
    assert case.kept.packed() == array("I", range(18)).tobytes()
    *chunks, usage = case.chunks
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == [*range(18)]
    assert [index for index, chunk in enumerate(chunks) if "kvrouter" in chunk] == [7], "one notice"
    assert usage["usage"]["completion_tokens"] == 18


async def test_tokens_that_a_token_writer_takes_are_kept_packed() -> None:
    case, most = _Case(4, 10_000), 0
    for _ in range(2_000):
        await case.run([single(7)] * 4)
        most = max(most, len(case.kept.pieces))
    await case.end("cancel")
    assert case.taken == [256] * 31 + [32]
    assert most <= 2
    assert case.kept.packed() == array("I", [7] * 8_000).tobytes()


async def test_an_attempt_ends_with_the_error_of_its_token_writer() -> None:
    case = _Case(4, 100)
    await case.run([single(7)] * 2)
    case.client._events._writer.pending[case.connection] = cast(Any, None)  # No list, so that it cannot write.
    await case.run([single(8)])
    assert isinstance(case.attempt.ended.result(), (AttributeError, TypeError))
    assert case.kept.packed() == array("I", [7] * 2).tobytes(), "those before are counted"
    assert not case.call.worker.calls
