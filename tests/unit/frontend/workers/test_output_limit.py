"""An answer ends at the number of tokens that was asked for."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.generate_request import StopRules
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.attempt import Dispatch, RunningCall, WorkerAttempt
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import BackOff
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    TopLogprobs,
    WorkerServiceGenerateResponse,
)
from prometheus_client import CollectorRegistry

LENGTH, STOP = FinishReason.FINISH_REASON_LENGTH, FinishReason.FINISH_REASON_STOP


class Call:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def detailed(tokens: int, **fields: object) -> GenerateOutput:
    return GenerateOutput(
        token_ids=range(tokens),
        token_engine_ns=range(tokens),
        logprobs=[0.5] * tokens,
        top_logprobs=[TopLogprobs(token_ids=[1])] * tokens,
        text="x",
        **fields,
    )  # type: ignore[arg-type]


async def passed_on(limit: int, *pieces: GenerateOutput) -> tuple[list[Output], float | None, bool]:
    """Returns what a client gets of pieces, the number of overruns, and whether the call was cancelled."""
    registry, passed, call = CollectorRegistry(), [], Call()
    request = WorkerRequest(request_id="r", stop=StopRules(limit))
    dispatch = Dispatch(1, "w:1", request, b"", passed.append, Deadline.never(), lambda _: False)
    health = WorkerHealth(BackOff(), max_missed=2).begin("w:1", 1)
    attempt = WorkerAttempt(dispatch, health, FrontendMetrics(registry))

    def start(_: WorkerAttempt) -> RunningCall:
        return call

    attempt.start(start)
    for piece in pieces:
        attempt.on_response(WorkerServiceGenerateResponse(output=piece).SerializeToString())
    attempt.on_end()
    assert attempt.ended.done()
    overruns = registry.get_sample_value("kvrouter_frontend_output_overruns_total")
    return passed, overruns, call.cancelled


@pytest.mark.parametrize("has_details", [False, True])
@given(limit=st.integers(1, 20), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=12))
def test_no_more_tokens_arrive_than_were_requested(has_details: bool, limit: int, sizes: list[int]) -> None:
    pieces = [detailed(size) if has_details else GenerateOutput(token_ids=range(size)) for size in sizes]
    passed, overruns, cancelled = asyncio.run(passed_on(limit, *pieces))
    assert sum(piece.tokens for piece in passed) == min(limit, sum(sizes))
    assert overruns == cancelled == (sum(sizes) > limit)
    assert (passed[-1].finish_reason == LENGTH) == (sum(sizes) >= limit)
    for piece in passed:
        message = WorkerServiceGenerateResponse.FromString(piece.raw).output
        assert piece.tokens == len(piece.token_ids) == len(message.token_ids)
        if has_details:
            assert len(message.token_engine_ns) == len(message.logprobs) == len(message.top_logprobs) == piece.tokens


async def test_an_answer_that_keeps_to_the_limit_passes_unchanged() -> None:
    pieces = detailed(2), detailed(2, finish_reason=STOP)
    passed, overruns, _ = await passed_on(4, *pieces)
    assert [isinstance(each, DetailedOutput) and each.copy_message() for each in passed] == [*pieces]
    assert not overruns


async def test_a_finish_in_a_separate_piece_is_no_overrun() -> None:
    passed, overruns, _ = await passed_on(2, detailed(2), GenerateOutput(finish_reason=STOP))
    assert [piece.finish_reason for piece in passed] == [0, STOP]
    assert not overruns
