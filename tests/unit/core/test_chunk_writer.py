"""A writer passes chunks on as the reference does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, ChunkWriter, Observations
from kvrouter.core.reference import ChunkWriter as Reference, Observations as ReferenceObservations

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["ChunkWriter"] != "native", reason="the native core is not built")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


EVENT = b'data: {"choices":[]}\n\n'
_EVENTS = st.sampled_from(
    [
        EVENT,
        EVENT * 2,
        b'data: {"usage" : null}\n\n',
        b'data: {"usage":\t{}}\n\n',
        b'data: {"usage"}\n\n',
        b"event: a\ndata: data:\n\n",
        b": a\n\n",
        EVENT[:-1],
        b"",
    ]
)
_CHUNKS = st.builds(chunk, _EVENTS)
_ODD = st.sampled_from([b"", b"\r\n", b"1", b"+" + chunk(EVENT), b"0" * 7 + chunk(EVENT), chunk(EVENT).upper()])
_READS = (
    st.lists(_CHUNKS, max_size=3).map(b"".join)
    | _ODD
    | st.builds(lambda each, at: each[:at], _CHUNKS, st.integers(0, 40))
)
_STEPS = st.lists(
    st.tuples(st.just("take"), st.just(chunk(EVENT)) | _READS)
    | st.tuples(st.sampled_from(["begin", "limit"]), st.integers(0, 3))
    | st.tuples(st.sampled_from(["pause", "close", "wait", "missed"]), st.booleans())
    | st.tuples(st.just("taken"), st.none()),
    max_size=20,
)


class _Case(asyncio.Transport):
    def __init__(self, writer: Any, observations: Any) -> None:
        super().__init__()
        self.written: list[Any] = []
        self.closes = self.writing_paused = False
        self.reports: list[int] = []
        self.pending: dict[asyncio.Transport, list[bytes]] = {}
        self.latency = observations([1e9])
        self.writer = writer(self.pending, self, self)
        self.worker = self.writer.worker = SimpleNamespace(pieces=0, missed=0)

    def write(self, data: Any) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closes

    def _report(self, tokens: int) -> int:
        self.reports.append(tokens)
        return tokens + 1

    def step(self, action: str, value: Any) -> object:
        writer = self.writer
        if action == "pause":
            self.writing_paused = value
        elif action == "missed":
            self.worker.missed = int(value)
        elif action == "close":
            self.closes = value
        elif action == "wait":
            self.pending.clear()
            self.pending |= {self: []} if value else {asyncio.Transport(): []}
        elif action == "begin":
            writer.begin(value, writer.last_ns, self.latency, self._report)
        elif action == "limit":
            writer.limit = value
        elif action == "take":
            return writer.take(value)
        else:
            return writer.taken()
        return None

    @property
    def state(self) -> object:
        writer = self.writer
        counted = self.worker.pieces, self.latency.counts, self.reports
        return writer.limit, bool(writer.last_ns), counted, self.written


@given(_STEPS)
def test_chunks_are_passed_on_as_by_the_reference(steps: list[tuple[str, Any]]) -> None:
    ours, reference = _Case(ChunkWriter, Observations), _Case(Reference, ReferenceObservations)
    for action, value in [("begin", 1), ("limit", 4), *steps, ("taken", None)]:
        assert ours.step(action, value) == reference.step(action, value)
        assert ours.state == reference.state


def test_chunks_are_written_as_they_are_and_counted_by_their_events() -> None:
    case = _Case(ChunkWriter, Observations)
    both = chunk(EVENT) + chunk(EVENT * 2)
    assert not case.step("take", both)
    case.step("begin", 2)
    case.step("limit", 3)
    assert case.step("take", both)
    assert case.reports == [3]
    assert not case.step("take", chunk(EVENT)), "its limit is reached"
    assert case.written == [both]
    assert case.step("taken", None) == (3, b"")
    assert case.step("taken", None) == (0, b"")
