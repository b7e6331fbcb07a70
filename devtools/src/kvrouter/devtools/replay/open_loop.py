"""Replays a trace through a Frontend in open loop: requests are sent when due, whatever became of earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest

_PREPARED_AHEAD = 128  # requests whose tokens are expanded before they are due: about 14,000 tokens, 60 KiB, each
MAX_IN_FLIGHT = 4096
"""Maximum number of requests in flight; further ones wait. A safety limit: reaching it makes the run invalid."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How requests are made from the trace."""

    model: str
    """Model of the requests."""
    id_prefix: str
    """Prefix of request ids, unique to the run; the request's position follows."""
    mode: str | None = None
    """Routing mode of all requests; None for the Scheduler's own."""
    request_timeout_seconds: float = 600.0
    """Wall time after which a request is abandoned, above 0."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay."""

    records: list[RequestRecord]
    """One record for each request, in the order of the trace."""
    wall_seconds: float
    """Time from the first due time to the end of the last response."""
    times_limited: int
    """Number of requests that waited because too many were in flight."""


def generate_request(request: TraceRequest, options: ReplayOptions) -> FrontendServiceGenerateRequest:
    """Returns the call for a request of the trace, with exactly `output_length` output tokens."""
    message = FrontendServiceGenerateRequest(
        request_id=f"{options.id_prefix}-{request.index}", model=options.model, token_ids=request.tokens()
    )
    message.stop_conditions.max_tokens = request.output_length
    message.stop_conditions.ignore_eos = True
    if options.mode is not None:
        message.overrides.mode = options.mode
    return message


async def replay(
    frontend: Frontend,
    requests: Sequence[TraceRequest],
    time_scale: TimeScale,
    options: ReplayOptions,
    on_end: Callable[[RequestRecord], None] = lambda _: None,
) -> ReplayResult:
    """Sends every request when it is due and collects the responses. Calls `on_end` when each one ends.

    A failed request is recorded with its code and affects no other.
    """
    run = _Run(frontend, time_scale, options, on_end)
    return await run.play(requests)


class _Run:
    def __init__(
        self, frontend: Frontend, time_scale: TimeScale, options: ReplayOptions, on_end: Callable[[RequestRecord], None]
    ) -> None:
        self._frontend = frontend
        self._time_scale = time_scale
        self._options = options
        self._on_end = on_end
        self._places = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._times_limited = 0
        self._started = 0.0

    async def play(self, requests: Sequence[TraceRequest]) -> ReplayResult:
        records = [
            RequestRecord(
                request.index,
                self._time_scale.due_engine_seconds(request.arrival_ms),
                request.input_length,
                clock=self._time_scale.clock,
            )
            for request in requests
        ]
        async with asyncio.TaskGroup() as tasks:
            prepared: asyncio.Queue[FrontendServiceGenerateRequest] = asyncio.Queue(_PREPARED_AHEAD)
            ahead = asyncio.Event()
            tasks.create_task(self._prepare(requests, prepared, ahead))
            await ahead.wait()
            self._started = time.perf_counter()
            for request, record in zip(requests, records, strict=True):
                message = await prepared.get()
                due = self._started + self._time_scale.due_wall_seconds(request.arrival_ms)
                wait = due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                if self._places.locked():
                    self._times_limited += 1
                await self._places.acquire()
                tasks.create_task(self._send(message, record, due))
        return ReplayResult(records, time.perf_counter() - self._started, self._times_limited)

    async def _prepare(
        self,
        requests: Sequence[TraceRequest],
        prepared: asyncio.Queue[FrontendServiceGenerateRequest],
        ahead: asyncio.Event,
    ) -> None:
        for request in requests:
            if prepared.full():
                ahead.set()
            await prepared.put(generate_request(request, self._options))
            await asyncio.sleep(0)  # expanding takes half a millisecond; responses and due requests run in between
        ahead.set()

    async def _send(self, message: FrontendServiceGenerateRequest, record: RequestRecord, due: float) -> None:
        try:
            record.late_wall_ms = max(0.0, time.perf_counter() - due) * 1000
            deadline = Deadline.after(self._options.request_timeout_seconds)
            async with aclosing(self._frontend.generate(message, deadline=deadline)) as pieces:
                async for piece in pieces:
                    record.take(piece)
        except KvRouterError as error:
            record.error, record.error_message = error.code.name, str(error)
        finally:
            self._places.release()
            record.ended_engine_s = self._time_scale.engine_seconds(time.perf_counter() - self._started)
        self._on_end(record)
