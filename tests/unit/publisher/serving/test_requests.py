"""Requests of an engine that emits, without any transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from unittest.mock import AsyncMock

import grpc
import pytest
from kvrouter.net.calls.limits import MAX_UNREAD_BYTES
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.serving.engine import packed_prompt
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.publisher.serving.requests import GenerateCall, RunningRequests
from kvrouter.v1.errors import KvRouterError, TooMuchUnread
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse as Response,
)

from ....waiting import until

LENGTH, ABORT, ERROR = (
    FinishReason.FINISH_REASON_LENGTH,
    FinishReason.FINISH_REASON_ABORT,
    FinishReason.FINISH_REASON_ERROR,
)


class Engine:
    """Records what it is told; the test emits."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        if not request.token_ids:
            raise RequestRefused("the prompt is empty")
        self.submitted.append(request.request_id)

    async def abort(self, request_ids: Sequence[str]) -> int:
        self.aborted += request_ids
        return len(request_ids)

    def load(self) -> Mapping[int, LoadReport]:
        return {}


class Call:
    """Records what its caller gets."""

    def __init__(self) -> None:
        self.on_cancelled: Callable[[], None] | None = None
        self.outputs: list[GenerateOutput] = []
        self.ended = False

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    def respond(self, encoded: bytes) -> None:
        assert not self.ended
        self.outputs.append(Response.FromString(encoded).output)

    def end(self, encoded: bytes | None = None) -> None:
        if encoded is not None:
            self.respond(encoded)
        self.ended = True

    def fail(self, error: KvRouterError) -> None:
        raise AssertionError(error)


def request(request_id: str, attempt: int = 0) -> WorkerServiceGenerateRequest:
    return WorkerServiceGenerateRequest(request_id=request_id, attempt=attempt, token_ids=[1])


def started(*request_ids: str) -> tuple[Engine, RunningRequests, list[Call]]:
    engine = Engine()
    requests = RunningRequests(engine)
    requests.attach()
    calls = [Call() for _ in request_ids]
    for request_id, call in zip(request_ids, calls, strict=True):
        requests.start(request(request_id), call)
    return engine, requests, calls


async def test_outputs_of_a_step_reach_their_calls() -> None:
    engine, requests, (first, second) = started("a", "b")
    requests.emit(
        [RequestOutput("a", [1], finish_reason=None), RequestOutput("b", [2, 3]), RequestOutput("unknown", [9])]
    )
    requests.emit([RequestOutput("b", [4], LENGTH), RequestOutput("a", [5])])
    requests.emit([RequestOutput("b", [6])])
    assert (first.tokens, second.tokens) == ([1, 5], [2, 3, 4])
    assert (first.ended, second.ended, second.outputs[-1].finish_reason) == (False, True, LENGTH)
    assert len(requests) == 1
    assert engine.aborted == []


async def test_outputs_from_another_thread_arrive_in_order() -> None:
    _, requests, (call,) = started("a")

    def emit() -> None:
        for token in range(1000):
            requests.emit([RequestOutput("a", [token])])
        requests.emit([RequestOutput("a", finish_reason=LENGTH)])

    thread = threading.Thread(target=emit)
    thread.start()
    await until(lambda: call.ended)
    thread.join()
    assert call.tokens == list(range(1000))


async def test_an_engine_that_emits_while_its_outputs_are_delivered_keeps_their_order() -> None:
    _, requests, (first, second) = started("a", "b")
    original = first.respond

    def respond(encoded: bytes) -> None:
        original(encoded)
        if len(first.outputs) == 1:
            requests.emit([RequestOutput("a", [3]), RequestOutput("b", [4])])

    first.respond = respond  # type: ignore[method-assign]
    requests.emit([RequestOutput("a", [1]), RequestOutput("b", [2])])
    assert (first.tokens, second.tokens) == ([1, 3], [2, 4])


async def test_a_refused_request_leaves_nothing() -> None:
    _, requests, _ = started()
    call = Call()
    with pytest.raises(RequestRefused):
        requests.start(WorkerServiceGenerateRequest(request_id="a"), call)
    assert len(requests) == 0
    requests.start(request("a"), call)
    assert len(requests) == 1


async def test_the_same_attempt_runs_once() -> None:
    engine, requests, (call,) = started("a")
    with pytest.raises(RequestRefused) as refused:
        requests.start(request("a"), Call())
    assert refused.value.code is grpc.StatusCode.ALREADY_EXISTS
    requests.emit([RequestOutput("a", [1])])
    assert call.tokens == [1]
    assert engine.submitted == ["a"]


async def test_a_later_attempt_replaces_an_earlier_one_whose_late_output_is_dropped() -> None:
    engine, requests, (earlier,) = started("a")
    later = Call()
    requests.start(request("a", attempt=2), later)
    assert earlier.ended
    assert earlier.outputs[-1].finish_reason == ABORT
    requests.emit([RequestOutput(engine.submitted[0], [1]), RequestOutput(engine.submitted[1], [2])])
    assert later.tokens == [2]
    await until(lambda: engine.aborted == engine.submitted[:1])
    with pytest.raises(RequestRefused):
        requests.start(request("a", attempt=1), Call())
    assert await requests.abort(["a"]) == 1
    assert engine.aborted == engine.submitted
    assert later.outputs[-1].finish_reason == ABORT
    assert len(requests) == 0


async def test_a_caller_that_goes_away_aborts_its_request() -> None:
    engine, requests, (call, other) = started("a", "b")
    assert call.on_cancelled is not None
    call.on_cancelled()
    await until(lambda: engine.aborted == ["a"])
    requests.emit([RequestOutput("a", [1]), RequestOutput("b", [2])])
    assert (call.tokens, other.tokens) == ([], [2])


async def test_an_output_that_cannot_be_encoded_ends_its_request_alone() -> None:
    engine, requests, (call, other) = started("a", "b")
    requests.emit([RequestOutput("a", [-1]), RequestOutput("b", [2])])
    assert call.outputs[-1].finish_reason == ERROR
    assert other.tokens == [2]
    await until(lambda: engine.aborted == ["a"])


async def test_a_caller_that_does_not_read_costs_bounded_memory_and_fails_alone() -> None:
    engine, requests, (other,) = started("b")
    call = GenerateCall()
    requests.start(request("a"), call)
    large = list(range(1 << 16))
    for _ in range(200):  # 50 MiB, far above the limit
        requests.emit([RequestOutput("a", large), RequestOutput("b", [1])])
    await until(lambda: engine.aborted == ["a"])
    with pytest.raises(TooMuchUnread, match=str(MAX_UNREAD_BYTES)) as refused:
        await call.write_to(AsyncMock())
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(other.tokens) == 200


async def test_what_still_runs_at_the_end_is_aborted() -> None:
    engine, requests, calls = started("a", "b")
    await requests.close()
    assert engine.aborted == ["a", "b"]
    assert all(call.outputs[-1].finish_reason == ABORT for call in calls)


@pytest.mark.parametrize("token_ids", [[], [7], [0, 1, (1 << 32) - 1]])
def test_a_prompt_can_be_read_without_a_number_for_each_token(token_ids: list[int]) -> None:
    packed = packed_prompt(WorkerServiceGenerateRequest(request_id="r", token_ids=token_ids))
    assert [*memoryview(packed).cast("I")] == token_ids
