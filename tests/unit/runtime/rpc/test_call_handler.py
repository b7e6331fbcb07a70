"""How methods are answered on a call stream: in the step that reads the call, or later."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.runtime import tracing
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import may_wait
from kvrouter.runtime.rpc.server import call_handler
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.worker_pb2 import AbortRequest

_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LATE, FAILING = AbortRequest(request_ids=["late"]), AbortRequest(request_ids=["late", "fails"])


@may_wait
def answer(request: AbortRequest, *, deadline: Deadline) -> bytes | Awaitable[bytes]:
    """Answers at once, unless the request says otherwise."""
    assert deadline.remaining() is not None

    async def later() -> bytes:
        if request == FAILING:
            raise BadRequest("no")
        return b"later"

    return later() if request.request_ids else b"at once"


def _handled(request: AbortRequest, *, trace: str = "", guard: Any = None) -> Any:
    handle = call_handler("/a/B", answer, AbortRequest.FromString, guard)
    call: Any = SimpleNamespace(time_left=9.0, trace_context=trace, stream=SimpleNamespace(metadata=()))
    return handle(request.SerializeToString(), call)


async def test_a_method_that_may_wait_answers_at_once_or_later() -> None:
    assert _handled(AbortRequest()) == b"at once"
    assert await _handled(LATE) == b"later"
    with pytest.raises(BadRequest):
        await _handled(FAILING)


@pytest.mark.parametrize("request_", [AbortRequest(), LATE])
async def test_its_span_lasts_until_it_has_answered(request_: AbortRequest) -> None:
    spans: list[str] = []

    @contextmanager
    def span(name: str, *_: object) -> Iterator[object]:
        spans.append(name)
        yield tracing.spans.OFF
        spans.append("end")

    before = tracing.spans.install(cast(Any, SimpleNamespace(span=span)))
    try:
        answered = _handled(request_, trace=_TRACE)
        assert not spans
        await answered
    finally:
        tracing.spans.install(before)
    assert spans == ["a/B", "end"]


async def test_its_guard_s_context_lasts_until_it_has_answered() -> None:
    admitted = nullcontext()
    answered = _handled(LATE, guard=SimpleNamespace(admit=lambda *_: admitted))
    assert await answered == b"later"
    assert await _handled(AbortRequest(), guard=SimpleNamespace(admit=lambda *_: admitted)) == b"at once"
