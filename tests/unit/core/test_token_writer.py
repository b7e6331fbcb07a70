"""A writer passes single tokens on as the reference does."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, Observations, TokenWriter, read_responses
from kvrouter.core.reference import (
    Observations as ReferenceObservations,
    TokenWriter as Reference,
    read_responses as read_as_reference,
)
from kvrouter.v1.calls_pb2 import CallResponse, OpenCallStreamResponse
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateResponse

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["TokenWriter"] != "native", reason="the native core is not built")

_TOKENS = st.integers(0, (1 << 32) - 1)
_SINGLE = st.builds(lambda token: GenerateOutput(token_ids=[token]), _TOKENS)
_PIECES = st.builds(
    GenerateOutput,
    token_ids=st.lists(_TOKENS, max_size=2),
    token_engine_ns=st.lists(st.integers(0, 1 << 40), max_size=1),
    finish_reason=st.sampled_from([0, 0, 2]),
    cached_tokens=st.none() | st.integers(0, 1),
    text=st.sampled_from(["", "", "a"]),
)
_STEPS = st.lists(
    st.tuples(st.just("take"), _SINGLE | _PIECES)
    | st.tuples(st.sampled_from(["begin", "limit"]), st.integers(0, 3))
    | st.tuples(st.sampled_from(["taken", "flush"]), st.none())
    | st.tuples(st.sampled_from(["pause", "missed"]), st.booleans()),
    max_size=20,
)


class _Case:
    def __init__(self, writer: Any, observations: Any, before: bytes, after: bytes, *, are_chunks: bool) -> None:
        self.transport = asyncio.Transport()
        self.protocol = SimpleNamespace(writing_paused=False)
        self.pending: dict[asyncio.Transport, list[bytes]] = {}
        self.wakes = 0
        self.reports: list[int] = []
        self.latency = observations([1e9])
        self.writer = writer(
            self.pending, self._wake, self.transport, self.protocol, before, after, are_chunks=are_chunks
        )
        self.worker = self.writer.worker = SimpleNamespace(pieces=0, missed=0)

    def _wake(self) -> None:
        assert not self.pending
        self.wakes += 1

    def _report(self, tokens: int) -> int:
        self.reports.append(tokens)
        return tokens + 1

    def step(self, action: str, value: Any) -> object:
        writer = self.writer
        if action == "pause":
            self.protocol.writing_paused = value
        elif action == "missed":
            self.worker.missed = int(value)
        elif action == "flush":
            self.pending.clear()
        elif action == "begin":
            writer.begin(value, writer.last_ns, self.latency, self._report)
        elif action == "limit":
            writer.limit = value
        elif action == "take":
            return writer.take(WorkerServiceGenerateResponse(output=value).SerializeToString())
        else:
            return writer.taken()
        return None

    @property
    def state(self) -> object:
        writer = self.writer
        events = [*self.pending.values()]
        return writer.limit, writer.total, self.worker.pieces, self.latency.counts, self.wakes, self.reports, events


@given(st.binary(max_size=300), st.binary(max_size=9), st.booleans(), _STEPS)
def test_tokens_are_passed_on_as_by_the_reference(
    before: bytes, after: bytes, are_chunks: bool, steps: list[tuple[str, Any]]
) -> None:
    ours = _Case(TokenWriter, Observations, before, after, are_chunks=are_chunks)
    reference = _Case(Reference, ReferenceObservations, before, after, are_chunks=are_chunks)
    for action, value in [("begin", 1), ("limit", 4), *steps, ("taken", None)]:
        latest = ours.writer.last_ns
        assert ours.step(action, value) == reference.step(action, value)
        assert ours.state == reference.state
        assert latest <= ours.writer.last_ns
        assert bool(ours.writer.last_ns) == bool(reference.writer.last_ns)


def test_tokens_taken_are_returned_once_and_packed() -> None:
    case = _Case(TokenWriter, Observations, b"", b"", are_chunks=False)
    case.step("begin", 2)
    case.step("limit", 2)
    for token in (7, 4_000_000_000):
        assert case.step("take", GenerateOutput(token_ids=[token]))
    assert case.step("taken", None) == (2, (7).to_bytes(4, "little") + (4_000_000_000).to_bytes(4, "little"))
    assert case.step("taken", None) == (0, b"")


_RESPONSES = st.lists(st.tuples(st.integers(0, 2), _SINGLE | _PIECES), max_size=8)


_MESSAGES = st.lists(st.tuples(_RESPONSES, st.sampled_from([None, None, CallResponse(number=0, kind=1)])), max_size=5)


@given(_MESSAGES, st.integers(0, 5))
def test_responses_of_messages_are_offered_to_the_writers_of_their_calls(
    messages: list[tuple[list[tuple[int, GenerateOutput]], CallResponse | None]], start: int
) -> None:
    ours = [_Case(TokenWriter, Observations, b"", b"", are_chunks=False) for _ in range(2)]
    reference = [_Case(Reference, ReferenceObservations, b"", b"", are_chunks=False) for _ in range(2)]
    for case in (*ours, *reference):
        case.step("begin", 1)
        case.step("limit", 3)
    writers: list[dict[int, Any]] = [
        {number: case.writer for number, case in enumerate(cases)} | {2: "no writer"} for cases in (ours, reference)
    ]
    encoded = [
        OpenCallStreamResponse(
            whole_numbers=[number for number, _ in whole],
            whole_responses=[WorkerServiceGenerateResponse(output=output).SerializeToString() for _, output in whole],
            responses=[] if other is None else [other],
        ).SerializeToString()
        for whole, other in messages
    ]
    read = read_responses(encoded, start, 1 << 20, writers[0])
    assert read == read_as_reference(encoded, start, 1 << 20, writers[1])
    messages = messages[start:]
    (left, others), taken, count = read
    assert len(left) + taken == sum(len(whole) for whole, _ in messages[:count])
    assert not any(other for _, other in messages[: max(0, count - 1)]), (
        "a message with others ends what is read together"
    )
    assert len(others) <= 1
    assert [case.state for case in ours] == [case.state for case in reference]
    assert [*writers[0]] == [*writers[1]], "those that have not taken one are removed"


@pytest.mark.parametrize("kind", [TokenWriter, Reference])
def test_a_writer_that_fails_leaves_its_response_to_the_receiver(kind: Any) -> None:
    is_native = kind is TokenWriter
    case = _Case(kind, Observations if is_native else ReferenceObservations, b"", b"", are_chunks=False)
    case.step("begin", 3)
    case.step("limit", 3)
    del case.worker.missed
    response = WorkerServiceGenerateResponse(output=GenerateOutput(token_ids=[1])).SerializeToString()
    encoded = OpenCallStreamResponse(whole_numbers=[7], whole_responses=[response]).SerializeToString()
    writers = {7: case.writer}
    read = (read_responses if is_native else read_as_reference)([encoded], 0, 1 << 20, writers)
    assert read == (([(7, response)], []), 0, 1)
    assert not writers


def test_the_time_is_that_of_the_caller_s_clock() -> None:
    case = _Case(TokenWriter, Observations, b"", b"", are_chunks=False)
    before = time.perf_counter_ns()
    case.writer.begin(1, before, case.latency, int)
    case.step("limit", 1)
    assert case.step("take", GenerateOutput(token_ids=[1]))
    assert before <= case.writer.last_ns <= time.perf_counter_ns()
    assert case.latency.sum == (case.writer.last_ns - before) / 1e9
