"""Pieces of a worker's output without rare fields are read without a parser of messages."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from kvrouter.core import IMPLEMENTATIONS, read_output
from kvrouter.core.reference.outputs import read_output as reference
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateResponse

_TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=80)
_TIMES = st.lists(st.integers(0, (1 << 64) - 1), max_size=3)

pytestmark = pytest.mark.skipif(IMPLEMENTATIONS["read_output"] != "native", reason="the native core is not built")


def _encoded(**fields: object) -> bytes:
    return WorkerServiceGenerateResponse(output=GenerateOutput(**fields)).SerializeToString()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field",
    [{"text": "a"}, {"logprobs": [0.5]}, {"index": 1}, {"preemptions": 1}],
    ids=str,
)
def test_a_piece_with_anything_else_is_left_to_the_parser(field: dict[str, object]) -> None:
    encoded = _encoded(token_ids=[7], **field)

    assert read_output(encoded) is None
    assert reference(encoded) is None


@given(_TOKENS, _TIMES, st.integers(0, 9), st.none() | st.integers(0, (1 << 32) - 1), st.data())
def test_a_piece_is_read_as_by_the_reference(
    tokens: list[int], times: list[int], reason: int, cached: int | None, data: st.DataObject
) -> None:
    encoded = _encoded(token_ids=tokens, token_engine_ns=times, finish_reason=reason, cached_tokens=cached)
    damaged = bytearray(encoded)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))

    assert read_output(encoded) == reference(encoded) == (tuple(tokens), reason, cached)
    assert read_output(bytes(damaged)) in (None, reference(bytes(damaged)))
