"""One run: a workload, engines and a policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvrouter.core import Rank
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.simulator.engines.cache_events import CacheEvents
from kvrouter.simulator.engines.fleet import Notice, make_fleet
from kvrouter.simulator.engines.hindsight import costs_ms
from kvrouter.simulator.results.outcome import Outcome, Peaks, Served
from kvrouter.simulator.routing.prefill_pool import PrefillPool
from kvrouter.simulator.routing.replicas import Schedulers, Sync
from kvrouter.simulator.routing.router import ranks_of
from kvrouter.simulator.workloads.workload import Prompts, Workload
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import AllBusy


@dataclass(frozen=True, slots=True)
class Setting:
    """What a workload runs against."""

    engines: Sequence[EngineConfig]
    """Engines, all with the same block size. If there are prefill engines, these are the decode engines."""
    options: RoutingOptions = field(default_factory=RoutingOptions)
    seed: int = 0
    """Seed of the policy's draws."""
    event_lag_s: float = 0.0
    """Seconds from a change in an engine's cache until the index knows of it."""
    calibration_error: float = 1.0
    """Error of the policy's time model: at 3 it expects three times as long."""
    restarts: Sequence[tuple[float, int]] = ()
    """(seconds after the start, engine): the engine loses its cache and requests, and is back at once."""
    schedulers: int = 1
    """Replicas of the Scheduler that decide independently."""
    sync: Sync | None = None
    """How replicas learn of each other's bookings; None for never."""
    sharded: bool = False
    """Whether requests go to replicas by prompt prefix; otherwise at random."""
    regret: bool = True
    """Whether each choice is compared with the others in hindsight, which takes about a third of the time."""
    sees_tiers: bool = True
    """Whether routing counts blocks below device memory."""
    prefill_engines: Sequence[EngineConfig] = ()
    """Engines that compute prompts for the others, with the same block size; restarts do not concern them."""


def simulate(workload: Workload, setting: Setting, prompts: Prompts) -> Outcome:
    """Runs the workload to its end. ``prompts`` are those of the workload, at any load."""
    return _Run(workload, setting, prompts).to_the_end()


class _Run:
    def __init__(self, workload: Workload, setting: Setting, prompts: Prompts) -> None:
        self._requests = workload.requests
        self._prompts = prompts
        self._engines = setting.engines
        self._restarts = sorted(setting.restarts)
        self._regret = setting.regret and not setting.prefill_engines
        options = setting.options
        follows = options.queries_indexer or self._regret
        engines = [*setting.engines, *setting.prefill_engines]
        self._fleet = make_fleet(engines, record_events=follows)
        ranks = ranks_of(engines)
        self._engine_of = {rank: engine for engine, rank in enumerate(ranks)}
        block_size = setting.engines[0].block_size
        tiers = setting.sees_tiers and any(each.host.num_blocks or each.shared.num_blocks for each in engines)
        self._events = CacheEvents(ranks, block_size, setting.event_lag_s, has_tiers=tiers) if follows else None
        schedulers = partial(
            Schedulers,
            events=self._events,
            options=options,
            clock=lambda: self._fleet.now,
            count=setting.schedulers,
            sync=setting.sync,
            sharded=setting.sharded,
            seed=setting.seed,
            calibration_error=setting.calibration_error,
        )
        self._prefill: PrefillPool | None = None
        if setting.prefill_engines:
            first_id = len(setting.engines) + 1
            prefill = schedulers(setting.prefill_engines, stage=Stage.STAGE_PREFILL, first_id=first_id)
            self._router = schedulers(setting.engines, stage=Stage.STAGE_DECODE, prefill=prefill)
            self._prefill = PrefillPool(prefill, self._engine_of, options.remote_prefill.transfer)
        else:
            self._router = schedulers(setting.engines)
        self._served: list[Served] = []
        self._unfinished = len(self._requests)
        self._peaks = Peaks()

    def to_the_end(self) -> Outcome:
        fleet, router, requests = self._fleet, self._router, self._requests
        while self._unfinished:
            upcoming = len(self._served)
            arrival = requests[upcoming].arrives_s if upcoming < len(requests) else math.inf
            restart = self._restarts[0][0] if self._restarts else math.inf
            for notice in fleet.advance(min(arrival, restart, self._next_due())):
                self._take(notice)
            now = fleet.now
            if self._events is not None:
                self._events.publish(fleet.take_events())
                self._events.apply_until(now)
            while self._restarts and self._restarts[0][0] <= now:
                self._restart(self._restarts.pop(0)[1])
            for number, rank in router.release(now):
                if rank is None:
                    self._refuse(number)
                else:
                    self._send(number, rank)
            if self._prefill is not None:
                self._hand_over(self._prefill, now)
            while (number := len(self._served)) < len(requests) and requests[number].arrives_s <= now:
                self._arrive(number)
        return Outcome(self._served, fleet.sorted_gaps(), fleet.totals(), self._peaks)

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        self._served.append(Served(request.arrives_s, request.prompt_tokens, request.output_tokens))
        self._peaks.see([self._fleet.load(engine) for engine in range(len(self._engines))])
        self._route(number)

    def _route(self, number: int) -> None:
        try:
            rank = self._router.route(number, self._prompts.hashed(number), self._fleet.now)
        except AllBusy:
            self._refuse(number)
            return
        if rank is not None:
            self._send(number, rank)

    def _refuse(self, number: int) -> None:
        self._served[number].engine, self._served[number].refused = -1, True
        self._unfinished -= 1

    def _send(self, number: int, rank: Rank) -> None:
        served = self._served[number]
        served.engine, served.sent_at = self._engine_of[rank], self._fleet.now
        if self._regret and self._events is not None:
            blocks = self._events.overlaps(self._prompts.hashed(number)).blocks.tolist()
            costs = costs_ms(self._fleet, self._engines, blocks, served.prompt_tokens)
            served.regret_ms = costs[served.engine] - min(costs)
        tokens = self._router.tokens_to_transfer(number)
        if self._prefill is None or not tokens:
            self._fleet.submit(served.engine, number, self._prompts.tokens(number), served.output_tokens)
            return
        try:
            engine = self._prefill.begin(number, self._prompts.hashed(number), tokens, self._fleet.now)
        except AllBusy:
            self._prefill_locally(number)
            return
        if engine is not None:
            self._compute(number, engine)

    def _prefill_locally(self, number: int) -> None:
        """Has a decode engine compute a prompt, since all prefill engines are busy."""
        try:
            rank = self._router.prefill_locally(number, self._prompts.hashed(number), self._fleet.now)
        except AllBusy:
            self._refuse(number)
            return
        if rank is not None:
            self._send(number, rank)

    def _compute(self, number: int, engine: int) -> None:
        """Has a prefill engine compute a prompt."""
        self._served[number].prefill_engine = engine
        self._fleet.submit(engine, number, self._prompts.tokens(number), 1)

    def _hand_over(self, prefill: PrefillPool, now: float) -> None:
        """Sends queued prompts to prefill engines, and transferred ones to their decode engines."""
        for number, engine in prefill.release(now):
            if engine is None:
                self._prefill_locally(number)
            else:
                self._compute(number, engine)
        for number in prefill.transferred(now):
            served = self._served[number]
            tokens = self._prompts.tokens(number)
            self._fleet.submit(served.engine, number, tokens, served.output_tokens, received=True)

    def _next_due(self) -> float:
        due = self._router.next_due()
        return due if self._prefill is None else min(due, self._prefill.next_due())

    def _take(self, notice: Notice) -> None:
        """Notes the progress of a request."""
        served = self._served[notice.number]
        if self._prefill is not None and notice.engine != served.engine:
            served.found(notice)
            self._prefill.computed(notice)
            return
        if notice.generated == 1:
            served.first_at = notice.at
            if served.prefill_engine < 0:
                served.found(notice)
        if notice.finished:
            served.ended_at = notice.at
            self._unfinished -= 1
        self._router.progress(notice.number, notice.generated, finished=notice.finished)

    def _restart(self, engine: int) -> None:
        """Restarts an engine; its requests are sent again if they have no output yet."""
        self._fleet.restart(engine)
        if self._events is not None:
            self._events.restarted(engine)
        for number, served in enumerate(self._served):
            if served.engine != engine or served.failed or not math.isnan(served.ended_at):
                continue
            self._router.lost(number)
            if math.isnan(served.first_at):
                served.attempts += 1
                served.engine = -1
                self._route(number)
            else:
                served.failed = True
                self._unfinished -= 1
