"""Runs an engine model in real time.

While there is work, steps follow each other without a pause on the engine's clock, however long Python takes in
between: a step begins at the end of the previous one and includes the requests that had arrived by then. Time stamps
are therefore those of an engine that never waits for Python. The lateness of the process against the engine's clock is
measured: while it is small compared with a step, callers receive tokens on time. An engine that is later than
``MAX_LATE_SECONDS`` goes on from the present instead. If it caught up, new requests would wait until its clock reaches
their arrival, batches would be smaller, and the additional messages would make the process still later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvrouter.mocker.clock import EngineClock
from kvrouter.mocker.engine.implementation import EngineModel
from kvrouter.mocker.engine.types import CacheEvent, DuplicateRequest, EngineRequest, FinishReason, Output
from kvrouter.mocker.poison import Poison

MAX_LATE_SECONDS = 0.02
"""Lateness that an engine catches up with, wall seconds: more than a pause of the garbage collector."""


@dataclass(slots=True)
class Tokens:
    """The output of a request since its previous one: tokens of one or several steps."""

    token_ids: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    """Engine seconds at which each token was generated."""
    first: Output | None = None
    """The output with the first token, if these tokens include it."""
    finish_reason: FinishReason | None = None


Publish = Callable[[Iterable[CacheEvent]], None]
"""Receives the cache events of each step."""
Emit = Callable[[list[tuple[str, Tokens]]], None]
"""Receives the output of all requests of a step, with their ids."""


@dataclass(slots=True)
class _Running:
    """A request, with its output that is not emitted yet."""

    prompt_tokens: int
    pending: Tokens = field(default_factory=Tokens)


class EngineDriver:
    """Runs one rank's engine in real time. ``run`` must be running."""

    def __init__(
        self,
        engine: EngineModel,
        clock: EngineClock,
        publish: Publish,
        emit: Emit,
        *,
        observe_lateness: Callable[[float], None] = lambda _: None,
        stream_interval: int = 1,
        poison: Poison | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            engine: The model to step.
            clock: The engine's clock.
            publish: Called with the cache events of each step.
            emit: Called with the outputs of each step.
            observe_lateness: Called for each step with the engine seconds by which its output is late.
            stream_interval: Tokens, at least 1, that are collected before they are emitted. The first token and the
                rest at the end are not delayed.
            poison: A token that harms the process; None for none.
        """
        self.engine = engine
        self.clock = clock
        self._observe_lateness = observe_lateness
        self._stream_interval = stream_interval
        self._poison = poison
        self.prompt_tokens_total = 0
        """Prompt tokens of requests with a first token."""
        self.cached_tokens_total = 0
        """Prompt tokens of those requests that were found in the cache."""
        self.host_tokens_total = 0
        """Those of them that were loaded from host memory."""
        self.shared_tokens_total = 0
        """Those of them that were loaded from shared storage."""
        self._publish = publish
        self._emit = emit
        self._arrivals: deque[tuple[float, EngineRequest]] = deque()
        self._running: dict[str, _Running] = {}
        self._work = asyncio.Event()

    def submit(self, request: EngineRequest) -> None:
        """Starts a request.

        Raises:
            RequestRefused: the engine refuses the request.
        """
        self.engine.check(request, waiting=len(self._arrivals))
        if request.request_id in self._running:
            raise DuplicateRequest(request.request_id)
        if self._poison is not None:
            self._poison.submitted(request)
        self._running[request.request_id] = _Running(request.prompt_tokens)
        self._arrivals.append((self.clock.now(), request))
        self._work.set()

    def abort(self, request_id: str) -> bool:
        """Aborts a request, which has no further output. Returns whether it was known."""
        if self._running.pop(request_id, None) is None:
            return False
        for arrival in self._arrivals:
            if arrival[1].request_id == request_id:
                self._arrivals.remove(arrival)
                return True
        self.engine.abort(request_id)
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
            now = self.clock.now()
            self._observe_lateness(max(0.0, now - at))
            emitted = self._collect(self.engine.end_step(at), at)
            if now - at > MAX_LATE_SECONDS * self.clock.factor:
                at = now
            if emitted and self._poison is not None:
                self._poison.goes_on(request_id for request_id, tokens in emitted if tokens.first is None)
            if emitted:
                self._emit(emitted)

    def _collect(self, outputs: Iterable[Output], at: float) -> list[tuple[str, Tokens]]:
        """Adds the outputs of a step to those not emitted yet, and returns what is to be emitted now."""
        due = []
        interval, requests = self._stream_interval, self._running
        for output in outputs:
            running = requests.get(output.request_id)
            if running is None:
                continue
            pending = running.pending
            pending.token_ids += output.token_ids
            pending.stamps += [at] * len(output.token_ids)
            if output.first_token:
                pending.first = output
                self.prompt_tokens_total += running.prompt_tokens
                self.cached_tokens_total += output.cached_tokens
                self.host_tokens_total += output.host_tokens
                self.shared_tokens_total += output.shared_tokens
            if output.finish_reason is not None:
                pending.finish_reason = output.finish_reason
                del requests[output.request_id]
            elif not output.first_token and len(pending.token_ids) < interval:
                continue
            due.append((output.request_id, pending))
            running.pending = Tokens()
        return due

    def _submit_until(self, at: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= at:
            arrived, request = self._arrivals.popleft()
            self.engine.submit(request, arrived)
