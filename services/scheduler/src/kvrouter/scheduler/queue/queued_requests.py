"""Waiting requests with their callers: one bounded queue for each component.

The queue is tried again at once when a booking gets its first token or is freed, and every LOOK_S seconds because of
other changes, such as a new rank or threshold. A new request is decided after the waiting ones. The overlap of a queued
request is queried again after FRESH_S seconds, because full caches change within seconds. With many queued requests
this is less often: QUERIES_PER_S in total. A failed query keeps the previous overlap.

The request of a gone caller is removed. If it was booked in the moment of its cancellation, the caller
receives the response, because it owns the booking and must free it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import structlog
from kvrouter.core import Rank
from kvrouter.runtime.booking_updates import Key
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.bookings.booking import Freed, Moved, OwnerRemoved, PrefillCompleted
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.identifiers import rank_message
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.metrics import SchedulerMetrics, ScrapedGauges
from kvrouter.scheduler.overlap.indexer_query import Overlaps
from kvrouter.scheduler.policies.interface import Choice, Explanation, Wait
from kvrouter.scheduler.queue.request_queue import RequestQueue
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import Decision
from kvrouter.scheduler.routing.router import Router
from kvrouter.scheduler.routing.snapshot import RETRY_AFTER_MS
from kvrouter.v1.errors import AllBusy, DeadlineExceeded, Internal, KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import QueuedRequest, QueueStatus, SelectWorkerRequest, SelectWorkerResponse
from msgspec.structs import replace

log = structlog.get_logger(component="scheduler")

LOOK_S = 1.0
"""Longest time between two passes while any request is queued, seconds."""

FRESH_S, QUERIES_PER_S = 2.0, 100.0
"""Age in seconds at which an overlap is queried again, and the most queries per second in total."""

_MAX_WAITED_S = 3600.0
"""Longest credible wait at a caller, seconds: its clock may be wrong."""


class Depth(NamedTuple):
    """Length of a component's queue."""

    requests: int
    oldest_seconds: float
    """Seconds since the arrival of the longest-waiting request; 0 if none waits."""


@dataclass(slots=True)
class _Waiter:
    request: RequestContext
    overlaps: Overlaps
    """The last answer of the Indexer."""
    rank: Rank
    reason: str
    arrived: float
    queued_from: float
    outcome: asyncio.Future[SelectWorkerResponse | KvRouterError]


@dataclass(slots=True)
class _Component:
    queue: RequestQueue[Key]
    pool: Pool
    """Another one once its block size has changed."""
    outcomes: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class QueuedRequests:
    """Dispatches requests: at once, or when a rank has room. ``run`` must be running.

    ``max_queued_requests`` is the limit for one component; a further request is refused. With 0 requests never wait.
    """

    router: Router
    metrics: SchedulerMetrics
    _: KW_ONLY
    max_queued_requests: int
    clock: Callable[[], float]
    _components: dict[ComponentName, _Component] = field(default_factory=dict, init=False)
    _waiting: dict[Key, _Waiter] = field(default_factory=dict, init=False)
    _wake: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __len__(self) -> int:
        """Returns the number of queued requests over all components."""
        return len(self._waiting)

    async def dispatch(
        self, request: RequestContext, overlaps: Overlaps, selection: SelectWorkerRequest, deadline: Deadline
    ) -> SelectWorkerResponse:
        """Decides on a request, waits for room if its policy says so, books it and returns the response.

        Args:
            request: The request. One without a booking never waits.
            overlaps: Overlaps of its prompt.
            selection: The call, with the arrival of the request at the caller and the time left for its first token.
            deadline: Deadline of the call.

        Raises:
            AllBusy: the queue is full, or nearly full and the tenant has its share of it.
            DeadlineExceeded: it could not meet its deadline.
            KvRouterError: no rank can take it.
        """
        decide = self._decide_behind if self._waiting else self.router.decide
        decision = decide(request, overlaps)
        key, verdict = request.booking.key, decision.verdict
        if key is None or not isinstance(verdict, Wait) or not self.max_queued_requests:
            response = self.router.settle(request, overlaps, decision)
            if key is not None and verdict is not None and self.max_queued_requests:
                self._component(request.pool).queue.dispatched(
                    key,
                    request.tenant,
                    verdict.use_tokens,
                    self.clock(),
                    conversation=request.conversation,
                    prompt_tokens=request.prompt.tokens,
                )
            return response
        self.router.decisions.add(decision.queued())
        try:
            return await self._enqueue(request, key, overlaps, decision, verdict, selection, deadline)
        except (AllBusy, DeadlineExceeded) as error:
            decision_id = next(self.router.decisions.ids)
            late = replace(decision, decision_id=decision_id, decided_unix_ns=time.time_ns())
            self.router.decisions.add(late.refused(error))
            raise

    def _decide_behind(self, request: RequestContext, overlaps: Overlaps) -> Decision:
        """Decides on a new request while others are queued."""
        if self._wake.is_set():
            self.look()
        decision = self.router.decide(request, overlaps, queued_tokens=self.queued_tokens(request.pool.name))
        component = self._components.get(request.pool.name)
        is_behind = component is not None and component.queue.is_behind and request.options.queues
        return decision.behind_the_queue() if is_behind and isinstance(decision.verdict, Choice) else decision

    async def _enqueue(
        self,
        request: RequestContext,
        key: Key,
        overlaps: Overlaps,
        decision: Decision,
        wait: Wait,
        selection: SelectWorkerRequest,
        deadline: Deadline,
    ) -> SelectWorkerResponse:
        """Waits until the request can be dispatched, books it and returns the response."""
        component = self._component(request.pool)
        now = self.clock()
        arrived_unix_ns = selection.arrived_unix_ns  # 0 for now
        waited = min(max(0.0, (time.time_ns() - arrived_unix_ns) / 1e9), _MAX_WAITED_S) if arrived_unix_ns else 0.0
        if "time_left_ms" in selection:
            deadline = deadline.within(selection.time_left_ms / 1e3)
        remaining = deadline.remaining()
        if not component.queue.add(
            key,
            wait,
            now,
            since=now - waited,
            deadline=math.inf if remaining is None else now + remaining,
            priority=request.priority,
            tenant=request.tenant,
            conversation=request.conversation,
            prompt_tokens=request.prompt.tokens,
        ):
            self._count(component, "full")
            most = self.max_queued_requests
            full = f"the queue has its maximum of {most}"
            if not component.queue.full:
                full = f"the tenant has its share of the queue, which has {len(component.queue)} of at most {most}"
            raise AllBusy(RETRY_AFTER_MS, f"no worker has room, and {full}")
        outcome: asyncio.Future[SelectWorkerResponse | KvRouterError] = asyncio.get_running_loop().create_future()
        self._waiting[key] = waiting = _Waiter(
            request, overlaps, decision.rank, wait.explanation.reason, now - waited, now, outcome
        )
        if component.queue.is_late(key, now):
            self._refuse_late(component, key)
        self._wake.set()
        try:
            return await self._outcome(waiting)
        finally:
            # A released request is not removed here: it counts as started only with its first token or its end.
            if key in component.queue:
                component.queue.remove(key)
                self._count(component, "cancelled")
            self._waiting.pop(key, None)

    async def _outcome(self, waiting: _Waiter) -> SelectWorkerResponse:
        try:
            while True:
                await asyncio.wait({waiting.outcome}, timeout=max(FRESH_S, len(self._waiting) / QUERIES_PER_S))
                if waiting.outcome.done():
                    return _answered(waiting.outcome.result())
                overlaps = await self.router.overlaps(waiting.request, Deadline.never())
                if not overlaps.failure:  # else the last answer stays
                    waiting.overlaps = overlaps
        except asyncio.CancelledError:
            if waiting.outcome.done():
                return _answered(waiting.outcome.result())
            raise

    async def run(self) -> None:
        """Runs passes when they are due, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._pause()):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self.look()

    def look(self) -> None:
        """Releases the requests with room, and refuses late ones."""
        for component in self._components.values():
            for key in component.queue.late(self.clock()):
                self._refuse_late(component, key)
            self._release(component)

    def _component(self, pool: Pool) -> _Component:
        component = self._components.get(pool.name)
        if component is None:
            queue: RequestQueue[Key] = RequestQueue(self.max_queued_requests, pool.headroom)
            component = self._components[pool.name] = _Component(queue, pool)
        component.pool = pool
        return component

    def follow(self, booking_table: BookingTable) -> None:
        """Subscribes to changes of bookings. Those that make room start a pass."""
        booking_table.subscribe(PrefillCompleted, self._progressed)
        booking_table.subscribe(Moved, self._progressed)
        booking_table.subscribe(OwnerRemoved, self._ended)
        booking_table.subscribe(Freed, self._ended)

    def _ended(self, change: OwnerRemoved | Freed) -> None:
        booking = change.booking
        if booking is None or (isinstance(change, OwnerRemoved) and booking.owners):
            return
        if (component := self._components.get(booking.pool.name)) is not None:
            component.queue.ended(booking.key, self.clock())
        if self._waiting:
            self._wake.set()

    def _progressed(self, change: PrefillCompleted | Moved) -> None:
        booking = change.booking
        if (component := self._components.get(booking.pool.name)) is not None:
            component.queue.started(booking.key)
        if self._waiting:
            self._wake.set()

    @property
    def longest(self) -> int:
        """Length of the longest queue of a component."""
        return max((depth.requests for depth in self.depths().values()), default=0)

    def depths(self) -> Mapping[ComponentName, Depth]:
        """Returns the length of each component's queue."""
        return {name: self._depth(component) for name, component in self._components.items()}

    def queued_tokens(self, name: ComponentName) -> Mapping[Rank, int]:
        """Returns the KV cache in tokens that the largest request queued for each rank of a component will add."""
        component = self._components.get(name)
        return {} if component is None else component.queue.queued_tokens()

    def waiting_for(self, name: ComponentName) -> Counter[Rank]:
        """Returns the number of queued requests for each rank of a component."""
        return Counter(waiting.rank for _, waiting in self._of(name))

    def status(self, name: ComponentName, *, listed: int) -> QueueStatus:
        """Returns the state of a component's queue, with its ``listed`` longest-waiting requests."""
        component = self._components.get(name)
        if component is None:
            return QueueStatus(capacity=self.max_queued_requests)
        now = self.clock()
        depth = self._depth(component)
        longest = sorted(self._of(name), key=lambda entry: entry[1].arrived)[:listed]
        return QueueStatus(
            requests=depth.requests,
            capacity=self.max_queued_requests,
            oldest_age_ms=int(depth.oldest_seconds * 1e3),
            refused_full=component.outcomes["full"],
            refused_late=component.outcomes["late"],
            released=component.outcomes["room"] + component.outcomes["patience"],
            longest=[
                QueuedRequest(
                    request_id=key[0],
                    rank=rank_message(waiting.rank),
                    age_ms=int((now - waiting.arrived) * 1e3),
                    reason=waiting.reason,
                )
                for key, waiting in longest
            ],
        )

    def _of(self, name: ComponentName) -> Iterator[tuple[Key, _Waiter]]:
        return (entry for entry in self._waiting.items() if entry[1].request.pool.name == name)

    def _depth(self, component: _Component) -> Depth:
        oldest = component.queue.oldest
        age = 0.0 if oldest is None else max(0.0, self.clock() - self._waiting[oldest].arrived)
        return Depth(len(component.queue), age)

    def _pause(self) -> float | None:
        if not self._waiting:
            return None
        due = min(component.queue.next_due() for component in self._components.values())
        return min(max(0.0, due - self.clock()), LOOK_S)

    def _refuse_late(self, component: _Component, key: Key) -> None:
        component.queue.remove(key)
        self._end(component, key, "late", DeadlineExceeded("no worker has room for the request before its deadline"))

    def _release(self, component: _Component) -> None:
        decision: Decision

        def decide(key: Key) -> Choice | Wait:
            nonlocal decision
            waiting = self._waiting[key]
            try:
                decision = self.router.decide(waiting.request, waiting.overlaps)
            except Exception as error:
                component.queue.remove(key)
                self._end(component, key, "refused", error)
                return Wait(0, Explanation(""))
            verdict = decision.verdict
            assert verdict is not None  # noqa: S101 - else it raises
            waiting.rank, waiting.reason = decision.rank, verdict.explanation.reason
            return verdict

        now = self.clock()
        for key, verdict in component.queue.release(now, decide, lambda: component.pool.open_ranks(now)):
            waiting = self._waiting[key]
            try:
                queued = replace(decision, queued_seconds=now - waiting.queued_from)
                response = self.router.settle(waiting.request, waiting.overlaps, queued)
            except Exception as error:
                component.queue.ended(key, now)
                self._end(component, key, "refused", error)
            else:
                self._end(component, key, "patience" if isinstance(verdict, Wait) else "room", response)
            self.metrics.queued_seconds.observe(now - waiting.queued_from)

    def _end(self, component: _Component, key: Key, outcome: str, answer: SelectWorkerResponse | Exception) -> None:
        self._count(component, outcome)
        future = self._waiting[key].outcome
        if isinstance(answer, SelectWorkerResponse | KvRouterError):
            future.set_result(answer)
        else:
            log.error("queue.request_failed", request_id=key[0], exc_info=answer)
            future.set_result(Internal("internal error", advice="The Scheduler's log has the cause."))

    def _count(self, component: _Component, outcome: str) -> None:
        component.outcomes[outcome] += 1
        self.metrics.queued.labels(outcome=outcome).inc()


def _answered(outcome: SelectWorkerResponse | KvRouterError) -> SelectWorkerResponse:
    if isinstance(outcome, KvRouterError):
        raise outcome.untraced()
    return outcome


def queue_gauges(queued: QueuedRequests) -> ScrapedGauges:
    """Returns length and oldest age of every component's queue."""
    documentation = {
        "kvrouter_scheduler_queue_length": "Queued requests.",
        "kvrouter_scheduler_queued_oldest_seconds": "Time since the oldest queued request arrived.",
    }
    return ScrapedGauges(
        documentation, ["component"], lambda: [([str(name)], depth) for name, depth in queued.depths().items()]
    )
