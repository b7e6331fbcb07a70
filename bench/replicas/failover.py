"""What replica sync is worth when the deciding Scheduler fails: the seconds after, in the simulator.

    .venv/bin/python bench/replicas/failover.py [--seeds 3] [--only prompts@3,chat@5]

The deciding Scheduler fails every ``EVERY_S`` seconds and another takes over. Frontends, 8 of them, open their sessions
there one after the other; until then their requests wait. What the successor knows:

    sync          all bookings, from before the failure
    sessions      the bookings of each Frontend, once that has opened its session
    leases        nothing that was booked before, since callers without a session assert nothing; no sync
    no failure    one Scheduler decides throughout

Virtual time: results depend on the seed and not on the machine. They cover requests that arrive within ``WINDOW_S`` of
a failure, or would if there were one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from statistics import fmean, median
from typing import Any
from unittest import mock

from kvrouter.core import Rank
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.simulator import simulation
from kvrouter.simulator.plan import routing_options
from kvrouter.simulator.routing.router import Announcement, Router, pool_of
from kvrouter.simulator.simulation import Setting, simulate
from kvrouter.simulator.workloads.generators import generate
from kvrouter.simulator.workloads.workload import Prompts, Workload

FRONTENDS = 8
EVERY_S, WINDOW_S = 15.0, 3.0
POLICIES = ("kv:1", "forecast")
ENGINES = [EngineConfig(hash_seed=number) for number in range(8)]


class Knows(Enum):
    """What the successor knows of the bookings before it."""

    SYNC = "sync"
    SESSIONS = "sessions"
    LEASES = "leases"


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of failure, and what the successor knows."""

    knows: Knows | None
    """None: no failure."""
    moves_s: tuple[float, float] = (0.0, 0.0)
    """The first and the last Frontend have opened their sessions so long after the failure."""

    @property
    def title(self) -> str:
        """As in the table."""
        if self.knows is None:
            return "no failure"
        return f"{self.knows.value}, Frontends move after {self.moves_s[0]:g} to {self.moves_s[1]:g} s"


KILLED, FROZEN = (0.0, 0.1), (2.0, 3.0)
CASES = (Case(None), *(Case(knows, moves) for moves in (KILLED, FROZEN) for knows in Knows))


@dataclass(slots=True)
class Live:
    """A booking that its Frontend remembers."""

    booked: Announcement
    generated: int = 0


@dataclass(slots=True)
class Failover:
    """The Schedulers of a run, one after the other, seen as one ``Router``."""

    make: Callable[[], Router]
    clock: Callable[[], float]
    case: Case
    router: Router = field(init=False)
    standby: Router = field(init=False)
    fails_at: float = EVERY_S
    moving: dict[int, float] = field(default_factory=dict)
    """When each Frontend that has not moved yet does so."""
    live: dict[int, Live] = field(default_factory=dict)
    waiting: dict[int, Prompt] = field(default_factory=dict)
    """Requests that no Scheduler has decided: at their Frontend, or queued."""
    ended: dict[int, list[Announcement]] = field(default_factory=dict)
    """Ends that each Frontend repeats once it has moved."""

    def __post_init__(self) -> None:
        """Begins with a Scheduler that decides and one that stands by."""
        if self.case.knows is None:
            self.fails_at = math.inf
        self.router, self.standby = self.make(), self.make()
        self.router.announce = self._note_announced

    def route(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Where a request goes that has just come; None if it waits."""
        self.waiting[number] = prompt
        if number % FRONTENDS in self.moving:
            return None
        rank = self.router.route(number, prompt, now)
        if rank is not None:
            del self.waiting[number]
        return rank

    def release(self, now: float) -> Iterator[tuple[int, Rank]]:
        """Requests that go now."""
        if now >= self.fails_at:
            self._fail(now)
        for frontend in [frontend for frontend, at in self.moving.items() if at <= now]:
            del self.moving[frontend]
            self._moved(frontend)
            for number in [number for number in self.waiting if number % FRONTENDS == frontend]:
                rank = self.route(number, self.waiting[number], now)
                if rank is not None:
                    yield number, rank
        for number, rank in self.router.release(now):
            self.waiting.pop(number, None)
            yield number, rank

    def next_due(self) -> float:
        """When something happens by itself."""
        return min(self.fails_at, self.router.next_due(), *self.moving.values(), math.inf)

    def progress(self, number: int, generated: int, *, finished: bool) -> None:
        """So many output tokens have come."""
        if number in self.live:
            self.live[number].generated = generated
        if number % FRONTENDS in self.moving:
            if finished:
                end = Announcement(self.live[number].booked.key, generated, freed=True)
                self.ended.setdefault(number % FRONTENDS, []).append(end)
                self._note_announced(end)
            return
        self.router.progress(number, generated, finished=finished)

    def lost(self, number: int) -> None:
        """The engine of a request has gone."""
        self.router.lost(number)

    def _note_announced(self, announcement: Announcement) -> None:
        number = int(announcement.key[0])
        if announcement.booked is not None:
            self.live[number] = Live(announcement)
        elif announcement.freed:
            self.live.pop(number, None)
        if self.case.knows is Knows.SYNC:
            self.standby.hear(announcement)

    def _fail(self, now: float) -> None:
        self.fails_at += EVERY_S
        first, last = self.case.moves_s
        step = (last - first) / (FRONTENDS - 1)
        self.moving = {frontend: now + first + step * frontend for frontend in range(FRONTENDS)}
        self.router, self.standby = self.standby, self.make()
        self.router.announce = self._note_announced
        if self.case.knows is Knows.SYNC:
            for live in self.live.values():
                assert_booking(self.standby, live)

    def _moved(self, frontend: int) -> None:
        """The Frontend's session is open, and its bookings are asserted."""
        for end in self.ended.pop(frontend, ()):
            self.router.hear(end)
        for number, live in self.live.items():
            if number % FRONTENDS != frontend:
                continue
            if self.case.knows is Knows.SESSIONS:
                assert_booking(self.router, live)
            elif self.case.knows is Knows.SYNC and live.generated:
                self.router.hear(Announcement(live.booked.key, 1))
                self.router.hear(Announcement(live.booked.key, live.generated))


def assert_booking(router: Router, live: Live) -> None:
    """Tells a Scheduler of a booking and its progress."""
    router.hear(live.booked)
    if live.generated:
        router.hear(Announcement(live.booked.key, 1))
        router.hear(Announcement(live.booked.key, live.generated))


def failover(case: Case, engines: Any, events: Any, options: Any, clock: Any, *, seed: int, **_: Any) -> Failover:
    """Stands in for the simulator's Schedulers."""
    return Failover(lambda: Router(pool_of(engines, clock), events, options, seed=seed), clock, case)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of a run, of the requests that arrive soon after a failure."""

    mean_ms: float
    p99_ms: float
    reuse: float


def run(load: Workload, prompts: Prompts, policy: str, case: Case, seed: int) -> Row:
    """One run."""
    setting = Setting(ENGINES, routing_options(policy), seed, event_lag_s=0.05, regret=False)
    with mock.patch.object(simulation, "Schedulers", partial(failover, case)):
        outcome = simulate(load, setting, prompts)
    after = [
        served for served in outcome.served if served.arrived_at >= EVERY_S and served.arrived_at % EVERY_S < WINDOW_S
    ]
    waits = sorted(served.ttft_s * 1e3 for served in after)
    reuse = sum(served.cached_tokens for served in after) / sum(served.prompt_tokens for served in after)
    return Row(fmean(waits), waits[int(0.99 * (len(waits) - 1))], reuse)


def table(runs: Mapping[tuple[str, Case], Sequence[Row]]) -> str:
    """Markdown: a row for each case, with each policy's results."""
    lines = ["| the successor knows by |" + "".join(f" {name}: TTFT mean | p99 | reuse |" for name in POLICIES)]
    lines.append("|---|" + "---|" * 3 * len(POLICIES))
    for case in CASES:
        cells = [case.title]
        for policy in POLICIES:
            rows = runs[policy, case]
            means = [row.mean_ms for row in rows]
            cells += [
                f"{median(means):,.0f} ({min(means):,.0f} to {max(means):,.0f})",
                f"{median(row.p99_ms for row in rows):,.0f}",
                f"{median(row.reuse for row in rows):.1%}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all, and prints a table for each workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="bursts@1,prompts@2,prompts@3,chat@5")
    options = parser.parse_args()
    for spec in options.only.split(","):
        name, _, load = spec.partition("@")
        runs: dict[tuple[str, Case], list[Row]] = {}
        for seed in range(options.seeds):
            workload = generate(name, 2400, seed)
            prompts = Prompts(workload, ENGINES[0].block_size)
            for policy in POLICIES:
                for case in CASES:
                    rows = runs.setdefault((policy, case), [])
                    rows.append(run(workload.faster(float(load)), prompts, policy, case, seed))
        print(f"\n{name}, load {load}, medians of {options.seeds} seeds\n\n{table(runs)}", flush=True)


if __name__ == "__main__":
    main()
