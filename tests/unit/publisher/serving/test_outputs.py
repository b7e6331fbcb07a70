"""The hand-written encoding of outputs is that of protobuf."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import given, strategies as st
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse

TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


@given(
    token_ids=st.one_of(TOKENS, TOKENS.map(tuple), TOKENS.map(lambda tokens: array("I", tokens))),
    finish_reason=st.none() | st.sampled_from(FinishReason.values()),
    cached_tokens=st.none() | st.integers(0, (1 << 32) - 1),
    details=st.none() | st.builds(GenerateOutput, token_engine_ns=TOKENS, text=st.text(max_size=20)),
)
def test_an_output_is_encoded_as_the_contract_defines(
    token_ids: list[int], finish_reason: FinishReason | None, cached_tokens: int | None, details: GenerateOutput | None
) -> None:
    output = RequestOutput("r", token_ids, finish_reason, cached_tokens, details)
    expected = GenerateOutput(token_ids=token_ids, finish_reason=finish_reason, cached_tokens=cached_tokens)
    if details is not None:
        expected.MergeFrom(details)
    assert WorkerServiceGenerateResponse.FromString(output.encode()).output == expected


@pytest.mark.parametrize("token_ids", [[-1], [1 << 32], [1, -1], ["a"]])
def test_token_ids_that_are_none_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(struct.error):
        RequestOutput("r", token_ids).encode()
