"""A writer passes single tokens on as the reference does."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, Observations, TokenWriter
from kvrouter.core.reference import Observations as ReferenceObservations, TokenWriter as Reference
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
    | st.tuples(st.just("begin"), st.integers(0, 3))
    | st.tuples(st.sampled_from(["taken", "flush"]), st.none())
    | st.tuples(st.just("pause"), st.booleans()),
    max_size=20,
)


class _Case:
    def __init__(self, writer: Any, observations: Any, before: bytes, after: bytes, *, are_chunks: bool) -> None:
        self.transport = asyncio.Transport()
        self.protocol = SimpleNamespace(writing_paused=False)
        self.pending: dict[asyncio.Transport, list[bytes]] = {}
        self.wakes = 0
        self.latency = observations([1e9])
        self.writer = writer(
            self.pending, self._wake, self.transport, self.protocol, before, after, are_chunks=are_chunks
        )

    def _wake(self) -> None:
        assert not self.pending
        self.wakes += 1

    def step(self, action: str, value: Any) -> object:
        writer = self.writer
        if action == "pause":
            self.protocol.writing_paused = value
        elif action == "flush":
            self.pending.clear()
        elif action == "begin":
            writer.begin(value, writer.last_ns, self.latency)
        elif action == "take":
            return writer.take(WorkerServiceGenerateResponse(output=value).SerializeToString())
        else:
            return writer.taken()
        return None

    @property
    def state(self) -> object:
        writer = self.writer
        return writer.limit, writer.total, self.latency.counts, self.wakes, [*self.pending.values()]


@given(st.binary(max_size=300), st.binary(max_size=9), st.booleans(), _STEPS)
def test_tokens_are_passed_on_as_by_the_reference(
    before: bytes, after: bytes, are_chunks: bool, steps: list[tuple[str, Any]]
) -> None:
    ours = _Case(TokenWriter, Observations, before, after, are_chunks=are_chunks)
    reference = _Case(Reference, ReferenceObservations, before, after, are_chunks=are_chunks)
    for action, value in [("begin", 2), *steps, ("taken", None)]:
        latest = ours.writer.last_ns
        assert ours.step(action, value) == reference.step(action, value)
        assert ours.state == reference.state
        assert latest <= ours.writer.last_ns
        assert bool(ours.writer.last_ns) == bool(reference.writer.last_ns)


def test_tokens_taken_are_returned_once_and_packed() -> None:
    case = _Case(TokenWriter, Observations, b"", b"", are_chunks=False)
    case.step("begin", 2)
    for token in (7, 4_000_000_000):
        assert case.step("take", GenerateOutput(token_ids=[token]))
    assert case.step("taken", None) == (2, (7).to_bytes(4, "little") + (4_000_000_000).to_bytes(4, "little"))
    assert case.step("taken", None) == (0, b"")


def test_the_time_is_that_of_the_caller_s_clock() -> None:
    case = _Case(TokenWriter, Observations, b"", b"", are_chunks=False)
    before = time.perf_counter_ns()
    case.writer.begin(1, before, case.latency)
    assert case.step("take", GenerateOutput(token_ids=[1]))
    assert before <= case.writer.last_ns <= time.perf_counter_ns()
    assert case.latency.sum == (case.writer.last_ns - before) / 1e9
