"""Pieces of streams pass a gateway as by the reference."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, PassedStream, pass_pieces
from kvrouter.core.reference import PassedStream as Reference, pass_pieces as reference

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["PassedStream"] != "native", reason="the native core is not built")

EVENT = b'data: {"choices":[]}\n\n'
_PIECES = st.sampled_from([EVENT, EVENT * 3, EVENT[:-1], b": a\n\n", b"data: \r\n\n", b'data: {"secret": 1}\n\n', b""])
_OTHERS = [
    ProcessingRequest(response_trailers=HttpTrailers()),
    ProcessingRequest(request_headers=HttpHeaders()),
    ProcessingRequest(response_body=HttpBody(body=EVENT, end_of_stream=True)),
    ProcessingRequest(response_body=HttpBody(body=EVENT), protocol_config=ProtocolConfiguration()),
    ProcessingRequest(response_body=HttpBody(body=EVENT), observability_mode=True),
]


def message(piece: bytes, endpoint: str = "") -> bytes:
    request = ProcessingRequest(response_body=HttpBody(body=piece))
    if endpoint:
        request.metadata_context.filter_metadata["envoy.lb"].update({"served": endpoint})
        request.attributes["envoy.filters.http.ext_proc"].update({"response.code_details": "via_upstream"})
    encoded: bytes = request.SerializeToString()
    return encoded


def frame(encoded: bytes, stream: int = 1) -> bytes:
    prefixed = struct.pack(">BI", 0, len(encoded)) + encoded
    return struct.pack(">IBI", len(prefixed) << 8, 0, stream) + prefixed


_MESSAGES = st.builds(message, _PIECES, st.sampled_from(["", "10.0.0.1:8000"])) | st.sampled_from(
    [each.SerializeToString() for each in _OTHERS]
)
_FRAMES = st.lists(st.builds(frame, st.just(message(EVENT)) | _MESSAGES, st.sampled_from([1, 3, 5])), max_size=6)
_STEPS = st.lists(
    st.tuples(st.just("pass"), _FRAMES.map(b"".join))
    | st.tuples(st.just("begin"), st.tuples(st.integers(-5, 300), st.integers(-5, 300)))
    | st.tuples(st.just("limit"), st.integers(-2, 6))
    | st.tuples(st.just("is_held"), st.booleans())
    | st.tuples(st.sampled_from(["moved", "taken"]), st.none()),
    max_size=12,
)


class _Case:
    def __init__(self, kind: Any, function: Any, *, sends_back: bool, hidden: list[bytes]) -> None:
        self.streams = {number: kind(sends_back=sends_back, hidden=hidden) for number in (1, 3)}
        self._pass_pieces = function

    def step(self, action: str, value: Any, most: int = 1 << 20) -> object:
        stream = self.streams[1]
        if action == "pass":
            return self._pass_pieces(b"?" + value, 1, 30, most, self.streams)
        if action == "begin":
            return stream.begin(*value)
        if action in {"limit", "is_held"}:
            return setattr(stream, action, value)
        return getattr(stream, action)()


@given(_STEPS, st.booleans(), st.sampled_from([[], [b"secret"]]), st.integers(0, 100))
def test_pieces_pass_as_by_the_reference(
    steps: list[tuple[str, Any]], sends_back: bool, hidden: list[bytes], most: int
) -> None:
    ours = _Case(PassedStream, pass_pieces, sends_back=sends_back, hidden=hidden)
    theirs = _Case(Reference, reference, sends_back=sends_back, hidden=hidden)
    for case in (ours, theirs):
        for stream in case.streams.values():
            stream.begin(1_000, 1_000)
            stream.limit = 3
    for action, value in [*steps, ("moved", None), ("taken", None)]:
        assert ours.step(action, value, most) == theirs.step(action, value, most)


@given(st.data())
def test_anything_else_is_left_as_by_the_reference(data: st.DataObject) -> None:
    damaged = bytearray(frame(message(EVENT, "a")) * 2)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    ours = _Case(PassedStream, pass_pieces, sends_back=True, hidden=[])
    theirs = _Case(Reference, reference, sends_back=True, hidden=[])
    for case in (ours, theirs):
        case.step("begin", (1_000, 1_000))
        case.step("limit", 10)

    assert ours.step("pass", bytes(damaged)) == theirs.step("pass", bytes(damaged))


@pytest.mark.parametrize("sends_back", [False, True])
@pytest.mark.parametrize("kind", [(PassedStream, pass_pieces), (Reference, reference)])
def test_the_gateway_may_pass_a_piece_on(kind: tuple[Any, Any], sends_back: bool) -> None:
    case = _Case(*kind, sends_back=sends_back, hidden=[])
    case.step("begin", (1_000, 1_000))
    frames, due, short_frames, pieces, payload_bytes, size = case.step("pass", frame(message(EVENT)) * 2)  # type: ignore[misc]
    assert (due, short_frames, pieces, size) == (1, 0, 1, len(frame(message(EVENT))))
    assert payload_bytes == size - 9
    answer = ProcessingResponse.FromString(frames[14:]).response_body.response
    assert answer.body_mutation.streamed_response.body == (EVENT if sends_back else b"")
    assert answer.HasField("body_mutation") is sends_back
    assert frames[:14] == frame(frames[14:])[:14]
    assert case.step("taken", None) == (1, EVENT)
    assert case.step("moved", None) == (payload_bytes, len(frames) - 9)


@pytest.mark.parametrize("kind", [(PassedStream, pass_pieces), (Reference, reference)])
def test_it_is_due_before_it_keeps_many_bytes(kind: tuple[Any, Any]) -> None:
    case = _Case(*kind, sends_back=False, hidden=[])
    case.step("begin", (1 << 20, 1 << 20))
    case.step("limit", 1 << 20)
    piece = bytes(16_000)
    for expected in (None, None, None, None, 1):
        case.step("moved", None)
        assert case.step("pass", frame(message(piece)))[1] == expected  # type: ignore[index]
    assert case.step("taken", None) == (5, piece * 5)
    assert case.step("pass", frame(message(piece)))[1] is None  # type: ignore[index]
