from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
from kvrouter.devtools.replay import open_loop as module
from kvrouter.devtools.replay.frontend_target import FrontendTarget, ReplayOptions, generate_request
from kvrouter.devtools.replay.open_loop import ReplayResult, replay
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import NoWorkers
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceGenerateResponse

FAST = TimeScale(load=1000.0, clock=100.0)
OPTIONS = ReplayOptions(model="m", id_prefix="run")


def trace(count: int, *, every_ms: float = 0.0) -> list[TraceRequest]:
    return [TraceRequest(index, index * every_ms, 600 + index, 5, (1, 2 + index)) for index in range(count)]


class ScriptedFrontend:
    """Answers each request with one piece, by a script that may wait or raise."""

    def __init__(self, script: Callable[[FrontendServiceGenerateRequest], Any] | None = None) -> None:
        self.requests: list[FrontendServiceGenerateRequest] = []
        self.in_flight = self.most_in_flight = 0
        self._script = script

    async def generate(
        self, request: FrontendServiceGenerateRequest, *, deadline: Deadline
    ) -> AsyncGenerator[FrontendServiceGenerateResponse, None]:
        self.requests.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self._script is not None:
                await self._script(request)
            yield FrontendServiceGenerateResponse(
                output={"cached_tokens": 16, "token_engine_ns": [5], "arrived_engine_ns": 0}
            )
        finally:
            self.in_flight -= 1


async def run(frontend: ScriptedFrontend, requests: list[TraceRequest], **options: Any) -> ReplayResult:
    return await replay(FrontendTarget(cast("Frontend", frontend), OPTIONS), requests, FAST, **options)


def test_a_request_asks_for_as_many_tokens_as_the_trace_says() -> None:
    message = generate_request(trace(1)[0], ReplayOptions(model="m", id_prefix="run", mode="random"))
    assert (message.request_id, message.model, message.overrides.mode) == ("run-0", "m", "random")
    assert len(message.token_ids.ids) == 600
    assert message.stop_conditions.max_tokens == 5
    assert message.stop_conditions.ignore_eos
    assert not generate_request(trace(1)[0], OPTIONS).HasField("overrides")


async def test_every_request_is_sent_once_in_order_and_recorded() -> None:
    frontend = ScriptedFrontend()
    ended: list[RequestRecord] = []
    result = await run(frontend, trace(300, every_ms=1.0), on_end=ended.append)
    assert [request.request_id for request in frontend.requests] == [f"run-{index}" for index in range(300)]
    assert [record.index for record in result.records] == list(range(300))
    assert all(record.completed and record.cached_tokens == 16 for record in result.records)
    assert len(ended) == 300


async def test_the_load_is_open_a_stuck_answer_delays_no_later_request() -> None:
    all_sent = asyncio.Event()

    async def script(request: FrontendServiceGenerateRequest) -> None:
        if request.request_id == "run-19":
            all_sent.set()
        await all_sent.wait()

    frontend = ScriptedFrontend(script)
    async with asyncio.timeout(20):
        await run(frontend, trace(20, every_ms=10.0))
    assert frontend.most_in_flight == 20


async def test_a_failed_request_is_recorded_by_code_and_fails_nothing_else() -> None:
    async def script(request: FrontendServiceGenerateRequest) -> None:
        if request.request_id == "run-1":
            raise NoWorkers("m")

    result = await run(ScriptedFrontend(script), trace(3))
    assert [record.error for record in result.records] == [None, NoWorkers("m").code.name, None]
    assert result.records[1].ended_engine_s is not None


async def test_the_safety_net_is_reported_when_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_IN_FLIGHT", 2)

    async def script(request: FrontendServiceGenerateRequest) -> None:
        await asyncio.sleep(0)

    frontend = ScriptedFrontend(script)
    result = await run(frontend, trace(6))
    assert result.times_limited > 0
    assert frontend.most_in_flight == 2


async def test_lateness_is_what_was_lost_between_due_and_sent() -> None:
    def block(_: RequestRecord) -> None:
        # Occupies the loop for 30 ms, as a busy machine would, while the next request comes due.
        end = asyncio.get_running_loop().time() + 0.03
        while asyncio.get_running_loop().time() < end:
            pass

    result = await replay(
        FrontendTarget(cast("Frontend", ScriptedFrontend()), OPTIONS),
        trace(2, every_ms=10.0),
        TimeScale(1.0, 1.0),
        on_end=block,
    )
    assert result.records[1].late_wall_ms > 10
