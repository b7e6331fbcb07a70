"""The order of requests waiting for room on their cheapest rank.

An engine serves its queue in order: the first request blocks all behind it, and none can move to another engine. Here a
request with room passes one without, and its rank is chosen when it leaves.

    queue.add(request, wait, now)                     # the policy returned a Wait
    for request in queue.late(now):                   # cannot meet its deadline
        ...refuse it
    for request, decided in queue.release(now, decide, open_ranks):
        ...book and dispatch it, before the next is decided
    queue.dispatched(request, tenant, tokens, now)    # another one went to a rank without waiting
    queue.started(request)                            # it has its first token
    queue.ended(request, now)                         # it has ended
    queue.remove(request)                             # its caller has gone

Order: the smallest priority, then the fewest tokens of KV cache to add; waiting time counts at AGING.
The tenant of least use is next (``fair_order``), and tenants share the capacity of the queue
(``kvrouter.runtime.bounds``). Within a tenant, a request also counts the tokens of its conversation's other
requests, on ranks and waiting before it: a conversation with many requests at once does not delay the others.

No request starves. Once a request has waited PATIENCE_S, the oldest one goes to its cheapest rank even without KV
cache for it: one at a time, the next when it has started, or after STALL_S. A request behind k older ones therefore
leaves within PATIENCE_S + (k + 1) * (STALL_S + INTERVAL_S), whatever its size and priority, if ``release`` is called
when due and ranks have free slots. Later requests do not count, unless they have waited longer elsewhere. With n
tenants the oldest of each take turns: k is then n times the older requests of the same tenant.

Without a free slot nothing goes, since it would only wait in the engine. A freed slot is given to a request
whose cheapest rank it is, if one is near the head of its tenant's order: it would cost more elsewhere. A request which
has waited for a slot for PATIENCE_S goes first once in TURN_S; else the order holds, however long the queue is.

A request is late if the expected wait makes it miss its deadline:

    now + (requests ahead + 1) * (mean interval between two releases) + own work > deadline

The mean covers about the last WINDOW releases and the time since the last one; below LEAST releases it is 0.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from kvrouter.core import Rank
from kvrouter.runtime.bounds import FairBound
from kvrouter.scheduler.load.headroom import Headroom
from kvrouter.scheduler.policies.interface import Choice, Wait
from kvrouter.scheduler.queue.fair_order import Entry, FairOrder, Place
from kvrouter.scheduler.request.options import Tenant

AGING = 2000.0
"""Tokens by which one second of waiting lowers a sort key. A prompt of 100,000 tokens passes a new one after 50 s,
although its patience ends far sooner. At 0 all long prompts would wait until then."""

PATIENCE_S = 10.0
"""Seconds after which a request is released whatever the state of its rank."""

STALL_S = 30.0
"""Seconds for which a request released without room delays the next one. Far above the time to first token on a full
rank, so it counts only if a caller never reports progress."""

INTERVAL_S = 0.02
"""Time between two passes over the queue, seconds, if the first one has tried TRIES requests in vain; less in
proportion to fewer. So passes in vain take a limited part of the time, and a free slot is taken at once."""

MAX_QUEUED_REQUESTS = 4096
"""Most waiting requests of a component."""

TRIES_PER_RANK, TRIES = 4, 64
"""Requests without room, for one rank and in all, after which a pass skips the others of that rank, or ends: a pass
takes milliseconds, however many requests wait. The next pass begins with the remaining ones."""

TURN_S = 1.0
"""Shortest time between two requests that go first after PATIENCE_S without a slot, seconds."""

WINDOW, LEAST = 64, 8
"""Releases over which the mean interval is taken, and the fewest that form a mean."""

T = TypeVar("T", bound=Hashable)

_NOBODY = Tenant()

Conversation: TypeAlias = tuple[str, bytes]
"""Name of the tenant, and digest of the conversation; empty for none."""


@dataclass(slots=True)
class _Queued(Generic[T]):
    request: T
    tenant: Tenant
    number: int
    since: float
    deadline: float
    priority: int
    wait: Wait
    """The last decision."""
    conversation: Conversation
    other_tokens: int
    """Tokens of the conversation's other requests when it arrived."""
    tokens: int
    """Its own tokens then."""
    prompt_tokens: int

    @property
    def must_go(self) -> float:
        """Latest time in seconds at which the computation of its prompt may begin."""
        return self.deadline - self.wait.prefill_ms / 1e3

    @property
    def place(self) -> Place:
        """Sort key. Independent of the current time, because all requests age alike."""
        return self.priority, self.wait.room_tokens + self.other_tokens + AGING * self.since

    @property
    def short_rank(self) -> Rank | None:
        """The rank for whose KV blocks it waits; None if it waits for anything else."""
        return None if self.wait.for_slot else self.wait.rank

    @property
    def entry(self) -> Entry[T]:
        """Returns the request in the order of its tenant."""
        return Entry(self.place, self.number, self.request, self.wait.use_tokens or self.wait.room_tokens)


class RequestQueue(Generic[T]):
    """The queued requests of one component. Pure: every event is passed in with its time in seconds."""

    def __init__(self, max_queued_requests: int = MAX_QUEUED_REQUESTS, headroom: Headroom | None = None) -> None:
        """Starts empty. ``headroom`` keeps account of the dispatched requests; None for a new one."""
        self.max_queued_requests = max_queued_requests
        self._headroom = headroom = Headroom() if headroom is None else headroom
        self._queued: dict[T, _Queued[T]] = {}
        self._order: FairOrder[T] = FairOrder(headroom.used)
        self._now = 0.0
        self._room = FairBound(max_queued_requests, lambda: self._now)
        self._numbers = itertools.count()
        self._forced: tuple[T, float] | None = None
        self._next_turn = -math.inf
        self._last_look, self._next_look = -math.inf, -math.inf
        self._look_again = False
        self._lacks_slots = False
        self._open: Collection[Rank] | None = None
        self._running: dict[T, tuple[Conversation, int]] = {}
        """Conversation and tokens of each dispatched request with a conversation, until its end."""
        self._room_tokens: defaultdict[Rank, dict[T, int]] = defaultdict(dict)
        """KV cache in tokens that each request waiting for KV blocks will add, by its cheapest rank."""
        self._tokens: Counter[Conversation] = Counter()
        """Tokens of each conversation's requests, queued or dispatched."""
        self._gone, self._counted_from = 0.0, 0.0
        self._soonest = math.inf
        """Lower bound of every queued request's ``must_go``."""

    def __len__(self) -> int:
        """Returns the number of queued requests."""
        return len(self._queued)

    def __contains__(self, request: T) -> bool:
        """Returns whether a request is queued."""
        return request in self._queued

    @property
    def full(self) -> bool:
        """Whether no further request may wait."""
        return len(self._queued) >= self.max_queued_requests

    @property
    def oldest(self) -> T | None:
        """The longest-waiting request; None if none waits."""
        oldest = self._order.oldest()
        return None if oldest is None else oldest[1]

    def queued_tokens(self) -> dict[Rank, int]:
        """Returns the KV cache in tokens that the largest request waiting for KV blocks will add, by cheapest rank."""
        if not self._room_tokens:
            return {}
        return {rank: max(tokens.values()) for rank, tokens in self._room_tokens.items()}

    def add(
        self,
        request: T,
        wait: Wait,
        now: float,
        *,
        since: float | None = None,
        deadline: float = math.inf,
        priority: int = 0,
        tenant: Tenant = _NOBODY,
        conversation: bytes = b"",
        prompt_tokens: int = 0,
    ) -> bool:
        """Adds a request waiting since ``since``.

        Returns False, and adds nothing, if the queue is full, or nearly full and the tenant has its share of it.
        """
        self._now = now
        if self.full or not self._room.try_add(tenant.name, tenant.weight, 1):
            return False
        if not self._queued:
            self._gone, self._counted_from = 0.0, now
        since = now if since is None else since
        key, tokens = (tenant.name, conversation), max(1, wait.room_tokens)
        others = self._tokens[key]
        self._use(key, tokens)
        number = next(self._numbers)
        queued = _Queued(request, tenant, number, since, deadline, priority, wait, key, others, tokens, prompt_tokens)
        self._queued[request] = queued
        self._note_room(queued)
        self._soonest = min(self._soonest, queued.must_go)
        self._order.add(tenant, queued.entry, since)
        return True

    @property
    def is_behind(self) -> bool:
        """Whether a pass was put off: a new request could take the room of queued ones."""
        return self._look_again and bool(self._queued)

    def remove(self, request: T) -> bool:
        """Removes a request. Returns whether it was queued."""
        self.started(request)
        return self._drop(request)

    def dispatched(
        self,
        request: T,
        tenant: Tenant,
        tokens: int,
        now: float,
        *,
        conversation: bytes = b"",
        prompt_tokens: int = 0,
    ) -> None:
        """Records a dispatch, which uses ``tokens`` of KV cache or as much as its slot counts."""
        tokens = max(1, tokens)
        self._headroom.began(request, tenant, tokens, prompt_tokens, now)
        if conversation and request not in self._running:
            key = tenant.name, conversation
            self._running[request] = key, tokens
            self._use(key, tokens)

    def started(self, request: T) -> None:
        """Records the first token of a released request."""
        if self._forced is not None and self._forced[0] == request:
            self._forced = None

    def ended(self, request: T, now: float) -> None:
        """Records the end of a dispatched request."""
        if self._forced is not None:
            self.started(request)
        self._headroom.ended(request, now)
        if self._running and (running := self._running.pop(request, None)) is not None:
            key, tokens = running
            self._use(key, -tokens)

    def is_late(self, request: T, now: float) -> bool:
        """Returns whether a queued request would miss its deadline."""
        queued = self._queued[request]
        ahead = self._order.ahead(queued.tenant, queued.entry)
        return now + (ahead + 1) * self._between_s(now) > queued.must_go

    def late(self, now: float) -> list[T]:
        """Returns the queued requests bound to miss their deadline."""
        between = self._between_s(now)
        late: list[T] = []
        if now + len(self._queued) * between <= self._soonest:
            return late
        self._soonest = math.inf
        for index, entry in enumerate(self._order.in_order(resumed=False)):
            must_go = self._queued[entry.request].must_go
            if now + (index - len(late) + 1) * between > must_go:
                late.append(entry.request)
            else:
                self._soonest = min(self._soonest, must_go)
        return late

    def release(
        self,
        now: float,
        decide: Callable[[T], Choice | Wait],
        open_ranks: Callable[[], Collection[Rank] | None] = lambda: None,
    ) -> Iterator[tuple[T, Choice | Wait]]:
        """Yields leaving requests with their decision: a Choice, or a Wait for one whose patience has ended.

        Args:
            now: Time in seconds.
            decide: Decides on a request. It is called for one after the other, in order; each result must reflect the
                releases before it. It may remove its own request.
            open_ranks: Returns the ranks with a free slot after the releases so far; None if some have no known limit.
        """
        if not self._queued:
            return
        if now < self._next_look:
            self._look_again = True
            return
        self._last_look, self._look_again = now, False
        if self._has_no_slot(open_ranks):
            return
        impatient = self._impatient(now)
        without_room: Counter[Rank | None] = Counter()
        tried: dict[str, Entry[T]] = {}
        keeping: set[str] = set()
        """Tenants whose requests leave room for others."""
        for request in self._in_order(impatient):
            queued = self._queued.get(request)
            if queued is None or queued.tenant.name in keeping:
                continue
            if without_room[queued.wait.rank] >= TRIES_PER_RANK and queued.wait.rank and request != impatient:
                continue
            decided = decide(request)
            if request not in self._queued:
                continue
            if isinstance(decided, Wait):
                self._keep_queued(queued, decided)
                if request != impatient or decided.for_slot:
                    tried[queued.tenant.name] = queued.entry
                    if decided.keeps_room:
                        keeping.add(queued.tenant.name)
                    # None passes the one that has lost its patience on its rank, so that room for it gathers there.
                    without_room[queued.wait.rank] += TRIES_PER_RANK if request == impatient else 1
                    self._next_look = now + INTERVAL_S * without_room.total() / TRIES
                    if without_room.total() >= TRIES:
                        self._order.pause(tried)
                        self._look_again = True
                        return
                    continue
                self._forced = (request, now)
            if request == impatient:
                self._next_turn = now + TURN_S
                self._order.force(queued.tenant)
            self._drop(request)
            use_tokens = decided.use_tokens or queued.entry.tokens
            _, conversation = queued.conversation
            self.dispatched(
                request,
                queued.tenant,
                use_tokens,
                now,
                conversation=conversation,
                prompt_tokens=queued.prompt_tokens,
            )
            self._count(now)
            yield request, decided
            if self._has_no_slot(open_ranks):
                break
        self._order.restart()

    def _has_no_slot(self, open_ranks: Callable[[], Collection[Rank] | None]) -> bool:
        self._open = open_ranks() if self._queued else None
        self._lacks_slots = self._open is not None and not self._open
        return self._lacks_slots

    def _may_have_room(self, request: T) -> bool:
        """Returns whether the cheapest rank of a request, when it was last decided, has a free slot now."""
        queued = self._queued.get(request)
        return (
            queued is not None
            and self._open is not None
            and (not queued.wait.for_slot or queued.wait.rank in self._open)
        )

    def next_due(self) -> float:
        """Returns the time in seconds of the next pass if nothing happens before; infinity if none is needed."""
        oldest = self._order.oldest()
        if oldest is None:
            return math.inf
        again = self._next_look if self._look_again else math.inf
        if self._lacks_slots:
            return again
        patience = oldest[0] + PATIENCE_S
        if self._forced is not None:
            patience = max(patience, self._forced[1] + STALL_S)
        return min(again, max(self._last_look + INTERVAL_S, patience))

    def _impatient(self, now: float) -> T | None:
        """Returns the request to release before all others; None if there is none."""
        if self._forced is not None and now < self._forced[1] + STALL_S:
            return None
        request = self._order.impatient(now - PATIENCE_S)
        if request is not None and self._queued[request].wait.for_slot and now < self._next_turn:
            return None
        return request

    def _in_order(self, first: T | None) -> Iterator[T]:
        """Yields ``first``, then the requests behind the end of the last pass, then the others, each in order."""
        if first is not None:
            yield first
        prefers = None if self._open is None else self._may_have_room
        for entry in self._order.in_order(resumed=True, prefers=prefers):
            yield entry.request

    def _drop(self, request: T) -> bool:
        queued = self._queued.pop(request, None)
        if queued is None:
            return False
        self._order.remove(queued.tenant, queued.entry, queued.since)
        self._forget_room(queued)
        self._room.remove(queued.tenant.name, 1)
        self._use(queued.conversation, -queued.tokens)
        return True

    def _use(self, key: Conversation, tokens: int) -> None:
        if key[1]:
            self._tokens[key] += tokens
            if not self._tokens[key]:
                del self._tokens[key]

    def _note_room(self, queued: _Queued[T]) -> None:
        if (rank := queued.short_rank) is not None:
            self._room_tokens[rank][queued.request] = queued.wait.room_tokens

    def _forget_room(self, queued: _Queued[T]) -> None:
        if (rank := queued.short_rank) is not None:
            del self._room_tokens[rank][queued.request]
            if not self._room_tokens[rank]:
                del self._room_tokens[rank]

    def _keep_queued(self, queued: _Queued[T], wait: Wait) -> None:
        """Updates a staying request, whose sort key may have changed."""
        before = queued.entry
        self._forget_room(queued)
        queued.wait = wait
        self._note_room(queued)
        self._soonest = min(self._soonest, queued.must_go)
        self._order.replace(queued.tenant, before, queued.entry)

    def _count(self, now: float) -> None:
        self._gone += 1
        if self._gone >= 2 * WINDOW:
            self._gone, self._counted_from = self._gone / 2, (self._counted_from + now) / 2

    def _between_s(self, now: float) -> float:
        """Returns the mean interval between two releases, seconds; 0 if it is unknown."""
        return (now - self._counted_from) / self._gone if self._gone >= LEAST else 0.0
