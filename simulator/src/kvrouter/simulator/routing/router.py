"""Routes requests to engines with the Scheduler's load accounting, candidates and policies, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import NamedTuple

from kvrouter.core import Rank
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.mocker.tiers import storage_tiers
from kvrouter.runtime.booking_updates import Key
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, Overlaps
from kvrouter.scheduler.policies.interface import Choice, Explanation, Wait
from kvrouter.scheduler.queue.request_queue import RequestQueue
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.context import RequestContext
from kvrouter.scheduler.routing.decide import Decision, decide
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.simulator.engines.cache_events import CacheEvents
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import AllBusy
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from msgspec.structs import replace

_WHOLE, _DECODE = Stage.STAGE_WHOLE, Stage.STAGE_DECODE  # read once: an enum lookup goes by name


def ranks_of(configs: Sequence[EngineConfig], first_id: int = 1) -> list[Rank]:
    """Returns the rank of each engine: worker ids from ``first_id``."""
    return [(number, 0) for number in range(first_id, first_id + len(configs))]


def pool_of(configs: Sequence[EngineConfig], clock: Callable[[], float], first_id: int = 1) -> Pool:
    """Returns a component of these engines. ``clock`` returns virtual seconds."""
    workers = {
        worker_id: WorkerRegistration(
            worker_id=worker_id,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            reads_shared_storage=config.shared.num_blocks > 0,
            storage_tiers=storage_tiers(config),
            ranks=[RankRegistration(dp_rank=dp_rank, incarnation=1, total_blocks=config.num_blocks)],
        )
        for (worker_id, dp_rank), config in zip(ranks_of(configs, first_id), configs, strict=True)
    }
    name = ComponentName("simulator", "workers")
    descriptor = ComponentDescriptor(model="simulated", block_size=configs[0].block_size)
    return Pool(ComponentView(name, descriptor, workers), Accounting(), report_age_seconds=5.0, clock=clock)


class Announcement(NamedTuple):
    """What one replica of the Scheduler announces about a booking."""

    key: Key
    generated: int
    """Output tokens so far; 0 when it is booked."""
    freed: bool = False
    booked: tuple[Rank, Prompt, int] | None = None
    """Rank, prompt and prefill tokens; only when it is booked."""


def _announce_to_nobody(_: Announcement) -> None:
    """Ignores an announcement: there are no other replicas."""


class Router:
    """Decides where requests go, from what a Scheduler knows."""

    def __init__(
        self,
        pool: Pool,
        events: CacheEvents | None,
        options: RoutingOptions,
        *,
        seed: int,
        calibration_error: float = 1.0,
        stage: Stage = _WHOLE,
        prefill: Router | None = None,
    ) -> None:
        """Starts without bookings.

        Args:
            pool: The engines.
            events: Feeds the index; None without one.
            options: Routing options.
            seed: Seed of the policy's draws.
            calibration_error: At 3 the policy expects 3 times the real durations.
            stage: The stage to book. In stage decode, the policy decides who computes each prompt.
            prefill: Decides for the engines that may compute prompts, in stage decode; None without such engines.
        """
        self.pool = pool
        self.announce: Callable[[Announcement], None] = _announce_to_nobody
        """Called with every booking, its progress and its end."""
        self._calibration_error = calibration_error
        self._events = events
        self._options = options
        self._stage = stage
        self._constraints = WorkerConstraints(stage)
        self._prefill = prefill
        self._transfers: dict[int, int] = {}
        self._rng = Random(seed)
        self._queued: RequestQueue[int] = RequestQueue()
        self._requests: dict[int, RequestContext] = {}
        self._attempts: dict[int, int] = {}

    def route(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Returns the rank for a new request; None if it is queued.

        Raises:
            AllBusy: all ranks are above their busy thresholds.
        """
        return self._route(number, prompt, self._constraints, now)

    def prefill_locally(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Frees a booking and books it again with its prompt, which no prefill engine computes; as ``route``."""
        self.lost(number)
        self._transfers.pop(number, None)
        return self._route(number, prompt, WorkerConstraints(_WHOLE), now)

    def _route(self, number: int, prompt: Prompt, constraints: WorkerConstraints, now: float) -> Rank | None:
        is_decode = constraints.stage == _DECODE
        request = RequestContext(
            self.pool,
            prompt,
            constraints,
            self._options,
            may_prefill_locally=is_decode,
            prefill_pools=() if self._prefill is None else (self._prefill.pool,),
        )
        decision = self._decide(request, now, self._queued.queued_tokens())
        if self._queued.is_behind and self._options.queues and isinstance(decision.verdict, Choice):
            decision = decision.behind_the_queue()
        if isinstance(decision.verdict, Wait) and self._queued.add(number, decision.verdict, now):
            self._requests[number] = request
            return None
        return self._book(number, request, decision)

    def release(self, now: float) -> Iterator[tuple[int, Rank | None]]:
        """Yields queued requests that leave now, and their ranks; None for one that is refused.

        Send each before the next is taken.
        """
        if not self._queued:
            return
        decisions: dict[int, Decision] = {}
        refused: list[int] = []

        def decide_again(number: int) -> Choice | Wait:
            try:
                decision = decisions[number] = self._decide(self._requests[number], now)
            except AllBusy:
                self._queued.remove(number)
                refused.append(number)
                return Wait(0, Explanation(""))
            assert decision.verdict is not None  # noqa: S101 - else there is a refusal
            return decision.verdict

        for number, _ in self._queued.release(now, decide_again, lambda: self.pool.open_ranks(now)):
            yield number, self._book(number, self._requests.pop(number), decisions[number])
        for number in refused:
            del self._requests[number]
            yield number, None

    def tokens_to_transfer(self, number: int) -> int:
        """Returns the prompt tokens that the rank of a request receives; 0 if it computes the prompt itself."""
        return self._transfers.get(number, 0)

    def next_due(self) -> float:
        """Returns when queued requests must be tried again if nothing happens, seconds."""
        return self._queued.next_due()

    def _decide(
        self, request: RequestContext, now: float, queued_tokens: Mapping[Rank, int] = MappingProxyType({})
    ) -> Decision:
        decision = decide(
            request,
            self._overlaps(request.prompt),
            rng=self._rng,
            now=now,
            queued_tokens=queued_tokens,
            calibration_error=self._calibration_error,
        )
        if decision.verdict is None:
            raise decision.snapshot.refusal(self.pool.name)
        return decision

    def _book(self, number: int, request: RequestContext, decision: Decision) -> Rank:
        key, rank = self._key(number), decision.rank
        self.pool.previous[self._options.mode] = rank
        prompt, prefill_tokens = request.prompt, decision.prefill_tokens
        if not self.pool.booked_load.book(key, rank, prompt, prefill_tokens, expected=decision.expected(request)):
            raise ValueError(f"request {number} is booked already")
        if decision.is_prefilled_remotely and decision.prefill is not None:
            self._transfers[number] = decision.prefill.uncached_tokens
        self.announce(Announcement(key, 0, booked=(rank, prompt, prefill_tokens)))
        return rank

    def progress(self, number: int, generated: int, *, finished: bool) -> None:
        """Notes the output of a request so far."""
        if finished:
            self._queued.ended(number, self.pool.booked_load.clock())
        elif generated == 1:
            self._queued.started(number)
        self._take(Announcement(self._key(number), generated, freed=finished))

    def lost(self, number: int) -> None:
        """Frees the booking of a request whose engine has restarted. The request may be routed again."""
        self._queued.ended(number, self.pool.booked_load.clock())
        self._take(Announcement(self._key(number), 0, freed=True))
        self._attempts[number] = self._attempts.get(number, 0) + 1

    def _take(self, announcement: Announcement) -> None:
        self.hear(announcement)
        self.announce(announcement)

    def hear(self, announcement: Announcement) -> None:
        """Applies an announcement, its own or another replica's."""
        booked_load = self.pool.booked_load
        if announcement.booked is not None:
            booked_load.book(announcement.key, *announcement.booked)
        elif announcement.freed:
            booked_load.free(announcement.key)
        else:
            if announcement.generated == 1:
                booked_load.prefill_complete(announcement.key)
            booked_load.output_tokens(announcement.key, announcement.generated)

    def _overlaps(self, prompt: Prompt) -> Overlaps:
        if not self._options.queries_indexer or self._events is None:
            return NOT_QUERIED
        overlaps = self._events.overlaps(prompt)
        if self._prefill is not None and prompt.tokens >= self._options.remote_prefill.min_tokens:
            overlaps = replace(overlaps, prefill={self._prefill.pool.name: self._prefill._overlaps(prompt)})  # noqa: SLF001 - an object of this class
        return overlaps

    def _key(self, number: int) -> Key:
        return (str(number), self._attempts.get(number, 0), self._stage)
