"""An answer ends at the number of tokens that was asked for."""

from __future__ import annotations

from hypothesis import given, strategies as st
from kvrouter.frontend.workers.output import DetailedOutput, OutputLimit
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, TopLogprobs, WorkerServiceGenerateResponse


def piece(tokens: int, **fields: object) -> DetailedOutput:
    return DetailedOutput.of(
        GenerateOutput(
            token_ids=range(tokens),
            token_engine_ns=range(tokens),
            logprobs=[0.5] * tokens,
            top_logprobs=[TopLogprobs(token_ids=[1])] * tokens,
            text="x",
            **fields,
        )  # type: ignore[arg-type]
    )


@given(st.integers(1, 20), st.lists(st.integers(0, 8), max_size=12))
def test_no_more_tokens_arrive_than_were_requested(limit: int, sizes: list[int]) -> None:
    counting, passed = OutputLimit(limit), 0
    for size in sizes:
        given = piece(size)
        cut = counting.cut(given)
        passed += cut.tokens
        assert cut.message is not None
        assert cut.tokens == len(cut.token_ids) == len(cut.message.token_engine_ns) == len(cut.logprobs)
        assert len(cut.top_logprobs) == len(cut.token_ids)
        assert WorkerServiceGenerateResponse.FromString(cut.raw).output == cut.message
        assert counting.overrun == (sum(sizes) > limit and passed == limit and cut is not given)
        if counting.overrun:
            assert cut.finish_reason == FinishReason.FINISH_REASON_LENGTH
            break
    assert passed == min(limit, sum(sizes))
    assert counting.reached == (sum(sizes) >= limit)


def test_an_answer_that_keeps_to_the_limit_passes_unchanged() -> None:
    counting = OutputLimit(4)
    last = piece(2, finish_reason=FinishReason.FINISH_REASON_STOP)
    message = counting.cut(piece(2)).message
    assert message is not None
    assert message.text == "x"
    assert counting.cut(last) is last
    assert not counting.overrun


def test_a_finish_in_a_separate_piece_is_no_overrun() -> None:
    counting = OutputLimit(2)
    counting.cut(piece(2))
    last = DetailedOutput.of(GenerateOutput(finish_reason=FinishReason.FINISH_REASON_STOP))
    assert counting.cut(last) is last
    assert not counting.overrun
