"""How methods are answered on a call stream: in the step that reads the call, or later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.net import trace_context
from kvrouter.runtime import tracing
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import may_wait
from kvrouter.runtime.rpc.server import call_handler
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.worker_pb2 import AbortRequest

_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATE, FAILING = AbortRequest(request_ids=["late"]), AbortRequest(request_ids=["late", "fails"])


_steps: list[str] = []
"""What has happened, in order."""


@pytest.fixture
def steps() -> list[str]:
    _steps.clear()
    return _steps


@may_wait
def answer(request: AbortRequest, *, deadline: Deadline) -> bytes | Awaitable[bytes]:
    """Answers at once, unless the request says otherwise."""
    assert deadline.remaining() is not None

    async def later() -> bytes:
        await asyncio.sleep(0)
        if request == FAILING:
            raise BadRequest("no")
        _steps.append("answered")
        return b"later"

    if request.request_ids:
        return later()
    _steps.append("answered")
    return b"at once"


def _handled(request: AbortRequest, *, trace: str = "", guard: Any = None, method: Any = answer) -> Any:
    handle = call_handler("/a/B", method, AbortRequest.FromString, guard)
    call: Any = SimpleNamespace(time_left=9.0, trace_context=trace, stream=SimpleNamespace(metadata=()))
    return handle(request.SerializeToString(), call)


async def test_a_method_that_may_wait_answers_at_once_or_later() -> None:
    assert _handled(AbortRequest()) == b"at once"
    assert await _handled(LATE) == b"later"
    with pytest.raises(BadRequest):
        await _handled(FAILING)


@pytest.mark.parametrize("request_", [AbortRequest(), LATE])
async def test_its_span_lasts_until_it_has_answered(steps: list[str], request_: AbortRequest) -> None:
    @contextmanager
    def span(name: str, *_: object) -> Iterator[object]:
        steps.append(name)
        yield tracing.spans.OFF
        steps.append("end")

    before = tracing.spans.install(cast(Any, SimpleNamespace(span=span)))
    try:
        answered = _handled(request_, trace=_TRACE)
        assert not steps
        await answered
    finally:
        tracing.spans.install(before)
    assert steps == ["a/B", "answered", "end"]


@pytest.mark.parametrize("request_", [AbortRequest(), LATE])
async def test_its_guard_s_context_lasts_until_it_has_answered(steps: list[str], request_: AbortRequest) -> None:
    @contextmanager
    def admit(path: str, *_: object) -> Iterator[None]:
        steps.append(path)
        yield
        steps.append("end")

    await _handled(request_, guard=SimpleNamespace(admit=admit))
    assert steps == ["/a/B", "answered", "end"]


async def test_an_answer_that_is_late_keeps_the_trace_context_of_its_call() -> None:
    seen: list[str] = []

    @may_wait
    def answer(_: AbortRequest, *, deadline: Deadline) -> Awaitable[bytes]:
        async def later() -> bytes:
            seen.append(trace_context.current())
            return b"later"

        return later()

    assert await asyncio.create_task(_handled(LATE, trace=_TRACE, method=answer)) == b"later"
    assert seen == [_TRACE]
