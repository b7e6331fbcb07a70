"""Replays a trace in open loop: requests are sent when due, whatever became of earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.replay.target import Prepared, Target
from kvrouter.devtools.traces.reader import TraceRequest

_PREPARED_AHEAD = 128  # requests whose tokens are expanded before they are due: about 14,000 tokens, 60 KiB, each
MAX_IN_FLIGHT = 4096
"""Maximum number of requests in flight; further ones wait. A safety limit: reaching it makes the run invalid."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Result of a replay."""

    records: list[RequestRecord]
    """One record for each request, in the order of the trace."""
    wall_seconds: float
    """Time from the first due time to the end of the last response."""
    times_limited: int
    """Number of requests that waited because too many were in flight."""


async def replay(
    target: Target[Prepared],
    requests: Sequence[TraceRequest],
    time_scale: TimeScale,
    on_end: Callable[[RequestRecord], None] = lambda _: None,
) -> ReplayResult:
    """Sends every request when it is due and collects the responses. Calls `on_end` when each one ends.

    A failed request is recorded with its code and affects no other.
    """
    return await _Run(target, time_scale, on_end).play(requests)


class _Run(Generic[Prepared]):
    def __init__(
        self, target: Target[Prepared], time_scale: TimeScale, on_end: Callable[[RequestRecord], None]
    ) -> None:
        self._target = target
        self._time_scale = time_scale
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
            prepared: asyncio.Queue[Prepared] = asyncio.Queue(_PREPARED_AHEAD)
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
        prepared: asyncio.Queue[Prepared],
        ahead: asyncio.Event,
    ) -> None:
        for request in requests:
            if prepared.full():
                ahead.set()
            await prepared.put(self._target.prepare(request))
            await asyncio.sleep(0)  # expanding takes half a millisecond; responses and due requests run in between
        ahead.set()

    async def _send(self, message: Prepared, record: RequestRecord, due: float) -> None:
        try:
            record.late_wall_ms = max(0.0, time.perf_counter() - due) * 1000
            await self._target.send(message, record)
        finally:
            self._places.release()
            record.ended_engine_s = self._time_scale.engine_seconds(time.perf_counter() - self._started)
        self._on_end(record)
