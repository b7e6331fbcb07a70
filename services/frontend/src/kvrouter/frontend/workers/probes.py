"""Probes every worker, so one whose event loop has stopped is suspected within seconds, and tries stalled ones.

A probe is a ping on the worker's call stream, or a grpc.health call, which its event loop answers. A deep queue or a
long prefill does not delay the answer, and a frozen process does not give it. HTTP/2 keepalive would not do: gRPC's own
threads answer it.

Listed servers that have only an OpenAI API are not probed here: their discovery asks for their models.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from functools import partial
from random import Random
from typing import Any

import structlog
from kvrouter.frontend.generate_request import StopRules
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.workers.attempt import Dispatch, Outcome, WorkerAttempt
from kvrouter.frontend.workers.client import WorkerClient, WorkerPool
from kvrouter.frontend.workers.connection import Probe
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.frontend.workers.observed_worker import ObservedWorker
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.net.ticks import tick
from kvrouter.runtime.config.fields import is_url
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.requests import serves

log = structlog.get_logger(component="frontend")

_PROMPT = bytes(TOKEN_BYTES)
"""Shorter than a block, so the engine caches nothing of it."""


class StallTrials:
    """Sends a request for one token to each stalled worker whose back-off has ended."""

    def __init__(self, workers: WorkerClient) -> None:
        self._workers = workers
        self._health = workers.health
        self._running: dict[str, WorkerAttempt] = {}
        self._refused: set[str] = set()
        """Addresses of stalled workers that refuse such a request. A client's request tries them."""

    def start_due(self) -> None:
        """Starts the trials due. Each ends with its first output, or when its worker stalls again."""
        stalled = {worker.endpoint: worker for worker in self._health.stalled_workers()}
        self._refused &= stalled.keys()
        for endpoint in stalled.keys() - self._running.keys() - self._refused:
            worker = stalled[endpoint]
            if self._health.admits(worker) and not worker.leaving and _has_generate(worker):
                self._start(worker)

    def _start(self, worker: ObservedWorker) -> None:
        endpoint = worker.endpoint
        dispatch = Dispatch(
            worker.registered[0][1].worker_id,
            endpoint,
            WorkerRequest(request_id=f"trial-{os.urandom(8).hex()}", stop=StopRules(max_tokens=1)),
            _PROMPT,
            # A worker that stalls after every first token is not recovered: its failures stay counted.
            lambda output: attempt.cancel() if output.tokens else None,
            Deadline.never(),
            may_leave=lambda _: True,
        )
        attempt = self._running[endpoint] = self._workers.start(dispatch)
        attempt.ended.add_done_callback(partial(self._end, endpoint))

    def _end(self, endpoint: str, ended: asyncio.Future[Outcome]) -> None:
        del self._running[endpoint]
        outcome = None if ended.cancelled() else ended.result()
        if isinstance(outcome, Exception) or (isinstance(outcome, WorkerFailure) and outcome.cause == "UNIMPLEMENTED"):
            self._refused.add(endpoint)
            log.info("worker.trial_refused", endpoint=endpoint, cause=str(outcome), consequence="a request tries it")

    def close(self) -> None:
        """Cancels the running trials."""
        for attempt in self._running.values():
            attempt.cancel()


def _has_generate(worker: ObservedWorker) -> bool:
    """Returns whether a worker serves whole requests at its Generate: no prefill worker, and no listed OpenAI API."""
    return not is_url(worker.endpoint) and any(serves(each.role) for _, each in worker.registered)


_IDLE_PROBES_PER_SECOND = 200
"""Maximum rate of probes to workers without running requests. A ping costs about 0.1 ms of processor time."""
_TURNS = 5
"""Parts of an interval. Workers of a part are probed together: a timer for each would cost more than the probes."""


class WorkerProbes:
    """Probes all registered workers. ``run`` must be running."""

    def __init__(
        self,
        directory: Directory,
        pool: WorkerPool,
        health: WorkerHealth,
        trials: StallTrials,
        *,
        interval_seconds: float,
    ) -> None:
        """Probes each worker every ``interval_seconds`` unless it sent something meanwhile, and starts trials.

        Workers without running requests share 200 probes per second, so many idle workers are probed less often, and
        thousands of new ones are connected to within seconds.
        """
        self._directory = directory
        self._pool = pool
        self._health = health
        self._trials = trials
        self._interval = interval_seconds
        self._turns: list[set[str]] = [set() for _ in range(_TURNS)]
        """Addresses of all workers, by the turn in which each is looked at."""
        self._next_probe: OrderedDict[str, float] = OrderedDict()
        """The same, each with the time of its next probe if it is idle then; the earliest first."""
        self._asking: dict[str, asyncio.Future[Any]] = {}
        """Probes without an answer: a ping, or the task of a probe that also notices lost connections."""
        self._asked_between: set[str] = set()
        """Those of them that began after the last turn of their workers, so less than an interval ago."""
        self._allowed = 0.0
        """Probes of idle workers that may begin now."""
        self._failing: set[str] = set()
        """Addresses whose probes hit a defect, which was logged."""
        self._rng = Random()

    async def run(self) -> None:
        """Follows the registrations and probes all workers, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch_progress(), name="worker-progress")
            group.create_task(self._take_turns(group), name="worker-probes")
            async for directory in self._directory.changes():
                self._health.update(directory.components)
                self._pool.update(directory.components)
                for endpoint in self._health.endpoints() - self._next_probe.keys():
                    if not is_url(endpoint):
                        # Distributes over the interval the probes of workers that were discovered together.
                        self._rng.choice(self._turns).add(endpoint)
                        self._next_probe[endpoint] = 0.0
                        self._next_probe.move_to_end(endpoint, last=False)

    async def _watch_progress(self) -> None:
        """Looks for stalled workers, and tries them. Intervals of this event loop are counted, as for probes."""
        try:
            while True:
                await tick(self._interval)
                self._health.interval_ended(self._interval)
                self._trials.start_due()
        finally:
            self._trials.close()

    async def _take_turns(self, group: asyncio.TaskGroup) -> None:
        """Takes the turns of every interval.

        Each interval without the answer to a probe counts as missed. Intervals of this event loop are counted, not
        clock time: a Frontend that was frozen itself processes the answers that arrived meanwhile and suspects nobody.
        """
        try:
            while True:
                for turn in self._turns:
                    await tick(self._interval / _TURNS)
                    self._take_turn(group, turn)
        finally:
            for asking in self._asking.values():
                asking.cancel()

    def _take_turn(self, group: asyncio.TaskGroup, turn: set[str]) -> None:
        for endpoint in turn - self._health.endpoints():
            turn.discard(endpoint)
            del self._next_probe[endpoint]
            group.create_task(self._leave(endpoint))
        for endpoint in self._asking.keys() & turn:
            if endpoint in self._asked_between:
                self._asked_between.discard(endpoint)
            else:
                self._health.missed(endpoint)
            if not isinstance(self._asking[endpoint], asyncio.Task):
                self._asking[endpoint] = group.create_task(self._ask(endpoint))
        for endpoint in self._health.take_unheard(turn):
            if endpoint not in self._asking:
                self._begin(group, endpoint)
        # The first probe of a worker connects to it, so thousands that come at once must wait for each other.
        self._allowed = min(self._allowed, 1.0) + _IDLE_PROBES_PER_SECOND * self._interval / _TURNS
        for endpoint in self._due(asyncio.get_running_loop().time(), int(self._allowed)):
            self._allowed -= 1
            self._asked_between.add(endpoint)
            self._begin(group, endpoint)

    def _due(self, now: float, count: int) -> list[str]:
        """Returns the addresses of at most ``count`` idle workers to probe now, those that waited longest first."""
        again = now + max(self._interval, len(self._next_probe) / _IDLE_PROBES_PER_SECOND)
        due: list[str] = []
        while self._next_probe and len(due) < count:
            endpoint = next(iter(self._next_probe))
            if self._next_probe[endpoint] > now:
                break
            self._next_probe[endpoint] = again
            self._next_probe.move_to_end(endpoint)
            if endpoint not in self._asking and not self._health.is_watched(endpoint):
                due.append(endpoint)
        return due

    def _begin(self, group: asyncio.TaskGroup, endpoint: str) -> None:
        """Begins a probe. A ping of an open stream takes no task, which would cost more than the ping."""
        pong = self._pool.connection(endpoint).ping()
        if pong is None:
            self._asking[endpoint] = group.create_task(self._ask(endpoint))
        else:
            self._asking[endpoint] = pong
            pong.add_done_callback(partial(self._take_pong, group, endpoint))

    def _take_pong(self, group: asyncio.TaskGroup, endpoint: str, pong: asyncio.Future[bool]) -> None:
        if self._asking.get(endpoint) is not pong:
            return  # A task asks meanwhile, and waits for the same answer.
        if pong.cancelled():
            self._end(endpoint)
        elif pong.result():
            self._end(endpoint)
            self._answered(endpoint)
        else:
            self._asking[endpoint] = group.create_task(self._ask(endpoint))

    def _end(self, endpoint: str) -> None:
        del self._asking[endpoint]
        self._asked_between.discard(endpoint)

    def _answered(self, endpoint: str) -> None:
        self._failing.discard(endpoint)
        self._health.answered(endpoint)

    async def _leave(self, endpoint: str) -> None:
        if asking := self._asking.get(endpoint):
            asking.cancel()
            await asyncio.wait({asking})
        self._failing.discard(endpoint)
        await self._pool.forget(endpoint)

    async def _ask(self, endpoint: str) -> None:
        """Waits for the answer to one probe. A worker whose answer hits a defect is at fault alone."""
        try:
            outcome = await self._pool.probe(endpoint)
        except Exception:
            outcome = Probe.UNREACHABLE
            if endpoint not in self._failing:
                self._failing.add(endpoint)
                log.exception("worker.probe_failed", endpoint=endpoint)
        finally:
            self._end(endpoint)
        if outcome is Probe.ANSWERED:
            self._answered(endpoint)
        else:
            self._health.missed(endpoint, is_unreachable=outcome is Probe.UNREACHABLE)
