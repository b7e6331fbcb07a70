"""The router between requests and engines: the Scheduler's slot manager, survey and policies, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random

from kvrouter.core import Rank
from kvrouter.mocker.engine_config import EngineConfig
from kvrouter.runtime.discovery import ComponentView
from kvrouter.scheduler.candidates import Wanted
from kvrouter.scheduler.choosing import Chosen, book, choose
from kvrouter.scheduler.hold_queue import HoldQueue
from kvrouter.scheduler.options import RoutingOptions
from kvrouter.scheduler.overlaps import NOT_ASKED, Overlaps
from kvrouter.scheduler.policies.interface import Choice, Hold
from kvrouter.scheduler.pools import Pool
from kvrouter.scheduler.prompts import Prompt
from kvrouter.scheduler.slots import Accounting, Key
from kvrouter.scheduler.survey import survey
from kvrouter.simulator.cache_events import CacheEvents
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration

_WHOLE = Wanted()
_STAGE = Stage.STAGE_WHOLE  # read once: the enum looks its values up by name


def pool_of(configs: Sequence[EngineConfig], clock: Callable[[], float]) -> Pool:
    """A component of these engines, worker ids from 1. ``clock`` tells virtual seconds."""
    workers = {
        number: WorkerRegistration(
            worker_id=number,
            max_batched_tokens=config.max_batched_tokens,
            max_sequences=config.max_sequences,
            ranks=[RankRegistration(dp_rank=0, incarnation=1, total_blocks=config.num_blocks)],
        )
        for number, config in enumerate(configs, start=1)
    }
    name = ComponentName("simulator", "workers")
    descriptor = ComponentDescriptor(model="simulated", block_size=configs[0].block_size)
    return Pool(ComponentView(name, descriptor, workers), Accounting(), report_age_seconds=5.0, clock=clock)


class Router:
    """Decides where requests go, from what a router knows."""

    def __init__(
        self, pool: Pool, events: CacheEvents | None, options: RoutingOptions, *, seed: int, pace: float = 1.0
    ) -> None:
        """``pace`` is how wrong the policy's time model is: at 3 it takes everything to last three times as long."""
        self.pool = pool
        self._pace = pace
        self._events = events
        self._options = options
        self._rng = Random(seed)
        self._held: HoldQueue[int] = HoldQueue()
        self._prompts: dict[int, Prompt] = {}
        self._attempts: dict[int, int] = {}
        self._slots: list[Rank | None] = [] if events is None else events.index.slots()

    def route(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Where a request goes that has just come; None if it is held."""
        chosen = self._choose(prompt, now)
        if isinstance(chosen.decided, Hold) and self._held.add(number, chosen.decided, now):
            self._prompts[number] = prompt
            return None
        return self._book(number, prompt, chosen)

    def release(self, now: float) -> Iterator[tuple[int, Rank]]:
        """Requests held that go now, and where. Each is to be sent before the next is asked for."""
        if not self._held:
            return
        chosen: dict[int, Chosen] = {}

        def decide(number: int) -> Choice | Hold:
            chosen[number] = self._choose(self._prompts[number], now)
            return chosen[number].decided

        for number, _ in self._held.release(now, decide):
            yield number, self._book(number, self._prompts.pop(number), chosen[number])

    def next_due(self) -> float:
        """When a request held must be looked at though nothing happens."""
        return self._held.next_due()

    def _choose(self, prompt: Prompt, now: float) -> Chosen:
        found = survey(self.pool, prompt, _WHOLE, self._options, self._overlaps(prompt), now=now)
        return choose(self.pool, prompt, self._options, found, found.free, self._rng, pace_error=self._pace)

    def _book(self, number: int, prompt: Prompt, chosen: Chosen) -> Rank:
        rank = chosen.row.candidate.rank
        self.pool.previous[self._options.mode] = rank
        if not book(self.pool, self._key(number), prompt, chosen):
            raise ValueError(f"request {number} is booked already")
        return rank

    def progress(self, number: int, generated: int, *, finished: bool) -> None:
        """So many output tokens have come."""
        key, slots = self._key(number), self.pool.slots
        if generated == 1 or finished:
            self._held.started(number)
        if finished:
            slots.free(key)
            return
        if generated == 1:
            slots.prefill_complete(key)
        slots.output_tokens(key, generated)

    def lost(self, number: int) -> None:
        """The engine of a request has gone: what it booked is freed. It may be routed once more."""
        self.pool.slots.free(self._key(number))
        self._held.started(number)
        self._attempts[number] = self._attempts.get(number, 0) + 1

    def overlap_blocks(self, prompt: Prompt) -> Mapping[Rank, int]:
        """Leading blocks of a prompt that each rank holds, as the index has it; ranks without any are left out."""
        if self._events is None:
            return {}
        blocks = memoryview(self._events.index.overlaps(prompt.local_hashes)).cast("I")
        return {rank: held for rank, held in zip(self._slots, blocks, strict=True) if rank and held}

    def _overlaps(self, prompt: Prompt) -> Overlaps:
        if not self._options.asks_indexer or self._events is None:
            return NOT_ASKED
        return self._events.overlaps(prompt)

    def _key(self, number: int) -> Key:
        return (str(number), self._attempts.get(number, 0), _STAGE)
