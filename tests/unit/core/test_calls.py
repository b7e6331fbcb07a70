"""Messages of call streams that have only calls or only responses are read without a parser of messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, read_calls, read_responses, write_calls, write_responses
from kvrouter.core.reference import calls as reference
from kvrouter.v1.calls_pb2 import (
    CallFailure,
    CallRequest,
    CallResponse,
    CallResponseKind,
    CallStreamClientHello,
    CallStreamDraining,
    CallStreamServerHello,
    OpenCallStreamRequest,
    OpenCallStreamResponse,
)

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["read_calls"] != "native", reason="the native core is not built")

_NUMBERS = st.integers(0, (1 << 64) - 1)
_CALLS = st.lists(
    st.builds(
        CallRequest,
        number=_NUMBERS,
        method=st.integers(0, (1 << 32) - 1),
        request=st.binary(max_size=200),
        more=st.booleans(),
        time_left_ms=st.none() | st.integers(0, (1 << 32) - 1),
        trace_context=st.text(max_size=5),
    ),
    max_size=3,
)
_WHOLE = st.lists(st.tuples(_NUMBERS, st.binary(max_size=200)), max_size=3)
_OTHERS = st.lists(
    st.builds(CallResponse, number=_NUMBERS, response=st.binary(max_size=200), kind=st.integers(-5, 5)), max_size=3
)


def _responses(whole: list[tuple[int, bytes]], others: list[CallResponse], **fields: object) -> bytes:
    return OpenCallStreamResponse(
        whole_numbers=[number for number, _ in whole],
        whole_responses=[response for _, response in whole],
        responses=others,
        **fields,  # type: ignore[arg-type]
    ).SerializeToString()


def _read_alone(message: bytes, read: Any = read_responses) -> object:
    """Returns the responses of one message; None if it must be read otherwise."""
    responses, _, count = read([message], 0, len(message), {})
    return responses if count else None


@given(_CALLS)
def test_calls_are_read_as_by_the_reference(calls: list[CallRequest]) -> None:
    encoded = OpenCallStreamRequest(calls=calls).SerializeToString()

    read = read_calls(encoded)

    assert read == reference.read_calls(encoded)
    assert [call[0] for call in read or ()] == [call.number for call in calls]
    assert write_calls(read or []) == reference.write_calls(read or []) == encoded


@given(_WHOLE, _OTHERS)
def test_responses_are_read_as_by_the_reference(whole: list[tuple[int, bytes]], others: list[CallResponse]) -> None:
    encoded = _responses(whole, others)

    responses, taken, count = read_responses([encoded], 0, len(encoded), {})

    assert (responses, taken, count) == reference.read_responses([encoded], 0, len(encoded), {})
    assert read_responses([encoded], 0, max(0, len(encoded) - 1), {}) == (([], []), 0, 0), "too long"
    if count:
        assert responses == (whole, [(other.number, other.kind, other.response) for other in others])
        assert write_responses(*responses) == reference.write_responses(*responses) == encoded
        assert not taken


@pytest.mark.parametrize(
    "field",
    [{"client_hello": CallStreamClientHello()}, {"cancelled": [1]}, {"ping": 0}, {"calls": []}],
    ids=str,
)
def test_calls_with_anything_else_are_left_to_the_parser(field: dict[str, object]) -> None:
    encoded = OpenCallStreamRequest(**{"calls": [CallRequest(number=1)]} | field).SerializeToString()  # type: ignore[arg-type]

    assert read_calls(encoded) is reference.read_calls(encoded) is None


@pytest.mark.parametrize(
    "field",
    [
        {"server_hello": CallStreamServerHello()},
        {"responses": [CallResponse(number=1, failure=CallFailure())]},
        {"responses": [CallResponse(number=1, kind=4)]},
        {"draining": CallStreamDraining()},
        {"pong": 0},
        {"whole_numbers": [1, 2]},
        {"whole_responses": []},
    ],
    ids=str,
)
def test_responses_with_anything_else_are_left_to_the_parser(field: dict[str, object]) -> None:
    message = OpenCallStreamResponse(**{"whole_numbers": [1], "whole_responses": [b"a"]} | field)  # type: ignore[arg-type]
    encoded = message.SerializeToString()

    for read in (read_responses, reference.read_responses):
        assert read([encoded], 0, len(encoded), {}) == (([], []), 0, 0)


@given(st.builds(CallFailure, code=st.integers(0, 20), message=st.text(max_size=20)))
def test_failures_are_written_as_by_the_reference(failure: CallFailure) -> None:
    failed = (7, CallResponseKind.CALL_RESPONSE_KIND_FAILED, failure.SerializeToString())

    written = write_responses([], [failed])

    assert written == reference.write_responses([], [failed])
    assert OpenCallStreamResponse.FromString(written).responses[0].failure == failure


@given(_CALLS.filter(bool), _WHOLE.filter(bool), _OTHERS, st.data())
def test_a_damaged_message_is_read_as_by_the_reference_or_not_at_all(
    calls: list[CallRequest], whole: list[tuple[int, bytes]], others: list[CallResponse], data: st.DataObject
) -> None:
    for encoded, read, expected in (
        (OpenCallStreamRequest(calls=calls).SerializeToString(), read_calls, reference.read_calls),
        (_responses(whole, others), _read_alone, partial(_read_alone, read=reference.read_responses)),
    ):
        damaged = bytearray(encoded)
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

        assert read(bytes(damaged)) in (None, expected(bytes(damaged)))  # type: ignore[operator]
