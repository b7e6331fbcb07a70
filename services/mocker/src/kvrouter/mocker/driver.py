"""Runs an engine model in real time.

While there is work, steps follow each other without a pause on the engine's clock, however long Python takes in
between: a step begins at the end of the previous one and includes the requests that had arrived by then. Time stamps
are therefore those of an engine that never waits for Python. The lateness of the process against the engine's clock is
measured: while it is small compared with a step, callers receive tokens on time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.engine.implementation import EngineModel
from kvrouter.mocker.engine.types import CacheEvent, DuplicateRequest, EngineRequest, FinishReason, Output


@dataclass(slots=True)
class Tokens:
    """The output since the previous read: tokens of one or several steps."""

    token_ids: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    """Engine seconds at which each token was generated."""
    first: Output | None = None
    """The output with the first token, if these tokens include it."""
    finish_reason: FinishReason | None = None


class _Stream:
    """Buffers the output of one request for its reader."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._pending = Tokens()
        self._filled = asyncio.Event()

    def put(self, output: Output, at: float) -> None:
        pending = self._pending
        pending.token_ids += output.token_ids
        pending.stamps += [at] * len(output.token_ids)
        if output.first_token:
            pending.first = output
        pending.finish_reason = output.finish_reason
        if output.first_token or output.finish_reason is not None or len(pending.token_ids) >= self._interval:
            self._filled.set()

    async def take(self) -> Tokens:
        await self._filled.wait()
        self._filled.clear()
        taken, self._pending = self._pending, Tokens()
        return taken


class EngineDriver:
    """Runs one rank's engine in real time. ``run`` must be running; ``publish`` receives the events of each step."""

    def __init__(
        self,
        engine: EngineModel,
        clock: EngineClock,
        publish: Callable[[Iterable[CacheEvent]], None],
        *,
        observe_lateness: Callable[[float], None] = lambda _: None,
        stream_interval: int = 1,
    ) -> None:
        """Starts nothing yet.

        Args:
            engine: The model to step.
            clock: The engine's clock.
            publish: Called with the cache events of each step.
            observe_lateness: Called for each step with the engine seconds by which its output is late.
            stream_interval: Tokens, at least 1, that are collected before a reader gets them. The first token and the
                rest at the end are not delayed.
        """
        self.engine = engine
        self.clock = clock
        self._observe_lateness = observe_lateness
        self._stream_interval = stream_interval
        self.prompt_tokens_total = 0
        """Prompt tokens of requests with a first token."""
        self.cached_tokens_total = 0
        """Prompt tokens of those requests that were found in the cache."""
        self._publish = publish
        self._arrivals: deque[tuple[float, EngineRequest]] = deque()
        self._streams: dict[str, _Stream] = {}
        self._work = asyncio.Event()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Tokens, None]:
        """Runs a request and yields its output. Closing the generator early aborts the request.

        Raises:
            RequestRefused: the engine refuses the request.
        """
        self.engine.check(request, waiting=len(self._arrivals))
        if request.request_id in self._streams:
            raise DuplicateRequest(request.request_id)
        stream = self._streams[request.request_id] = _Stream(self._stream_interval)
        self._arrivals.append((self.clock.now(), request))
        self._work.set()
        finished = False
        try:
            while not finished:
                tokens = await stream.take()
                if tokens.first is not None:
                    self.prompt_tokens_total += request.prompt_tokens
                    self.cached_tokens_total += tokens.first.cached_tokens
                finished = tokens.finish_reason is not None
                yield tokens
        finally:
            del self._streams[request.request_id]
            if not finished:
                self._abandon(request.request_id)

    def abort(self, request_id: str) -> bool:
        """Aborts a request, whose reader gets a last piece with that reason. Returns whether it was known."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        now = self.clock.now()
        self._abandon(request_id)
        stream.put(Output(request_id, (), FinishReason.ABORT, False, 0, now, now), now)
        return True

    def clear_cache(self) -> None:
        """Empties the cache in the next step."""
        self.engine.clear_cache()
        self._work.set()

    async def run(self) -> None:
        """Steps the engine until cancelled."""
        at = 0.0
        while True:
            self._submit_until(at)
            step = self.engine.begin_step(at)
            if step is None:
                if self._arrivals:
                    at = max(at, self._arrivals[0][0])
                    continue
                self._work.clear()
                await self._work.wait()
                at = self._arrivals[0][0] if self._arrivals else self.clock.now()
                continue
            self._publish(step.events)
            await self.clock.sleep_until(step.ends_at)
            at = step.ends_at
            self._observe_lateness(max(0.0, self.clock.now() - at))
            for output in self.engine.end_step(at):
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put(output, at)

    def _submit_until(self, at: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= at:
            arrived, request = self._arrivals.popleft()
            self.engine.submit(request, arrived)

    def _abandon(self, request_id: str) -> None:
        for arrival in self._arrivals:
            if arrival[1].request_id == request_id:
                self._arrivals.remove(arrival)
                return
        self.engine.abort(request_id)
