"""What a client with a key sees of an engine's response, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.proxy.engine_response import TransferFilter
from kvrouter.v1.errors import DependencyAway

PARAMS = {"remote_host": "10.0.0.7", "remote_block_ids": [1, 2], "odd": '}"]\\'}
WHOLE: dict[str, Any] = {
    "id": "x",
    "choices": [{"text": 'say "kv_transfer_params": {"a": 1}', "disaggregated_params": {"ctx_request_id": 7}}],
    "kv_transfer_params": PARAMS,
    "bootstrap_room": 123,
    "cache_salt": "secret",
    "usage": {"completion_tokens": 1},
}
SHOWN = WHOLE | {"kv_transfer_params": None, "bootstrap_room": None, "cache_salt": None}
SHOWN["choices"] = [WHOLE["choices"][0] | {"disaggregated_params": None}]


def passed(response: bytes, cuts: list[int], *, is_stream: bool, status: int = 200) -> bytes:
    filtered = TransferFilter(is_stream=is_stream, status=status)
    at = sorted(cut % (len(response) + 1) for cut in cuts)
    pieces = [response[start:end] for start, end in zip([0, *at], [*at, len(response)], strict=True)]
    return b"".join(map(filtered.take, pieces)) + filtered.take(b"", ends=True)


CUTS = st.lists(st.integers(0, 1000), max_size=8)


@given(CUTS, st.sampled_from([None, 2]))
def test_of_a_whole_response_internal_values_are_null(cuts: list[int], indent: int | None) -> None:
    encoded = json.dumps(WHOLE, indent=indent).encode()
    assert json.loads(passed(encoded, cuts, is_stream=False)) == SHOWN


@given(CUTS)
def test_of_a_stream_too(cuts: list[int]) -> None:
    plain = b'data: {"choices":[{"text":"a"}]}\n\n'
    stream = b"data: %b\n\n%bdata: [DONE]\n\n" % (json.dumps(WHOLE).encode(), plain)
    events = passed(stream, cuts, is_stream=True).split(b"\n\n")
    assert json.loads(events[0].removeprefix(b"data: ")) == SHOWN
    assert events[1:] == [plain.strip(), b"data: [DONE]", b""]


@given(st.binary(), CUTS, st.booleans())
def test_other_bytes_stay(response: bytes, cuts: list[int], is_stream: bool) -> None:
    assert passed(response, cuts, is_stream=is_stream) == response


def test_complete_events_are_not_held_back() -> None:
    filtered = TransferFilter(is_stream=True, status=200)
    event = b'data: {"choices":[]}\n\n'
    assert filtered.take(event) == event
    assert filtered.take(event + b"data: {") == event


@given(CUTS)
def test_an_error_that_quotes_the_request_is_replaced(cuts: list[int]) -> None:
    quoting = {"message": "1 validation error: input={'kv_transfer_params': {'remote_host': '10.0.0.7'}}"}
    error = json.loads(passed(json.dumps({"error": quoting}).encode(), cuts, is_stream=False, status=400))["error"]
    assert error["code"] == 400
    assert "10.0.0.7" not in str(error)
    plain = b'{"error": {"message": "max_tokens is too large"}}'
    assert passed(plain, cuts, is_stream=False, status=400) == plain
    event = passed(b"data: %b\n\n" % json.dumps({"error": quoting}).encode(), cuts, is_stream=True)
    assert event.startswith(b'data: {"error":')
    assert b"10.0.0.7" not in event


def test_what_cannot_be_held_ends_the_response() -> None:
    filtered = TransferFilter(is_stream=False, status=200)
    with pytest.raises(DependencyAway):
        filtered.take(b'{"kv_transfer_params":[' + b"1," * (1 << 21))
