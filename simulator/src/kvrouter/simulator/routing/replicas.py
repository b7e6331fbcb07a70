"""Scheduler replicas that decide independently, and what they learn of each other's bookings.

Requests go to the replicas at random, or by prompt prefix as with sharding. A replica knows its own bookings at once.
Its announcements arrive at the others after a lag, and each is lost with a probability. A loss shows as a gap with the
next announcement that arrives, or with a heartbeat. The other replica then fetches the whole state, which takes the
repair time; later announcements wait for it. Without sync, replicas never learn of each other's bookings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from kvrouter.core import Rank
from kvrouter.frontend.schedulers.sharding import PrefixSplit
from kvrouter.mocker.engine.config import EngineConfig
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.simulator.engines.cache_events import CacheEvents
from kvrouter.simulator.routing.router import Announcement, Router, pool_of
from kvrouter.v1.common_pb2 import Stage

HEARTBEAT_S = 1.0
"""Seconds after which a gap shows without a further booking."""


@dataclass(frozen=True, slots=True)
class Sync:
    """How replicas learn of each other's bookings."""

    lag_s: float = 0.0
    """Seconds from a booking until the others know of it."""
    loss: float = 0.0
    """Share of announcements that are lost, at least 0 and below 1."""
    repair_s: float = 0.1
    """Seconds from the detection of a gap until it is repaired."""


@dataclass(slots=True)
class Link:
    """Announcements from one replica to another, in order."""

    sync: Sync
    lost: list[Announcement] = field(default_factory=list)
    lost_since: float = 0.0
    repaired_at: float = 0.0
    under_way: deque[tuple[float, Announcement]] = field(default_factory=deque)
    """(time of arrival, announcement), in order of both."""

    def announce(self, announcement: Announcement, now: float, *, is_lost: bool) -> None:
        """Sends an announcement."""
        arrives = now + self.sync.lag_s
        self._beat(arrives)
        if arrives < self.repaired_at:
            self.under_way.append((self.repaired_at, announcement))
        elif is_lost:
            self.lost_since = self.lost_since if self.lost else arrives
            self.lost.append(announcement)
        elif self.lost:
            self._repair(seen_at=arrives)
            self.under_way.append((self.repaired_at, announcement))
        else:
            self.under_way.append((arrives, announcement))

    def known_by(self, now: float) -> Iterator[tuple[float, Announcement]]:
        """Yields what has arrived by a time: (time of arrival, announcement)."""
        self._beat(now)
        while self.under_way and self.under_way[0][0] <= now:
            yield self.under_way.popleft()

    def _beat(self, now: float) -> None:
        if self.lost and now >= self.lost_since + HEARTBEAT_S:
            self._repair(seen_at=self.lost_since + HEARTBEAT_S)

    def _repair(self, seen_at: float) -> None:
        self.repaired_at = seen_at + self.sync.repair_s
        self.under_way += [(self.repaired_at, announcement) for announcement in self.lost]
        self.lost.clear()


class Schedulers:
    """One or several replicas behind the interface of one ``Router``."""

    def __init__(
        self,
        engines: Sequence[EngineConfig],
        events: CacheEvents | None,
        options: RoutingOptions,
        clock: Callable[[], float],
        *,
        count: int,
        sync: Sync | None,
        sharded: bool,
        seed: int,
        calibration_error: float,
        stage: Stage = Stage.STAGE_WHOLE,
        first_id: int = 1,
        prefill: Schedulers | None = None,
    ) -> None:
        """Starts without bookings.

        Args:
            engines: The engines.
            events: Feeds the index; None without one.
            options: Routing options.
            clock: Returns virtual seconds.
            count: Replicas.
            sync: How replicas learn of each other's bookings; None for never.
            sharded: Whether requests go to replicas by prompt prefix; otherwise at random.
            seed: Seed of all draws.
            calibration_error: Error of the policy's time model.
            stage: The stage that is booked.
            first_id: Worker id of the first engine.
            prefill: What the same replicas know of the prefill engines; None without such engines.
        """
        self._clock = clock
        self._hearing_at: float | None = None
        self._deal, self._losses = Random(seed), Random(seed + 1)
        self._loss = sync.loss if sync is not None else 0.0
        self._split = PrefixSplit() if sharded else None
        self._home: dict[int, int] = {}
        self._routers: list[Router] = [
            Router(
                pool_of(engines, self._now, first_id),
                events,
                options,
                seed=seed + 7919 * place,
                calibration_error=calibration_error,
                stage=stage,
                prefill=None if prefill is None else prefill._routers[place],  # noqa: SLF001 - an object of this class
            )
            for place in range(count)
        ]
        self._links: list[tuple[Link, Router]] = []
        for router in self._routers:
            others = [(Link(sync), other) for other in self._routers if sync is not None and other is not router]
            self._links += others
            router.announce = self._teller([link for link, _ in others])

    def route(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Returns the rank for a new request; None if it is queued.

        Raises:
            AllBusy: all ranks are above their busy thresholds.
        """
        self._hear(now)
        if number not in self._home:
            self._home[number] = self._dealt(prompt)
        return self._routers[self._home[number]].route(number, prompt, now)

    def prefill_locally(self, number: int, prompt: Prompt, now: float) -> Rank | None:
        """Frees a booking and books it again with its prompt, which no prefill engine computes; as ``route``."""
        self._hear(now)
        return self._routers[self._home[number]].prefill_locally(number, prompt, now)

    def release(self, now: float) -> Iterator[tuple[int, Rank | None]]:
        """Yields queued requests that leave now, and their ranks; None for one that is refused.

        Send each before the next is taken.
        """
        self._hear(now)
        for router in self._routers:
            yield from router.release(now)

    def next_due(self) -> float:
        """Returns when queued requests must be tried again if nothing happens, seconds."""
        return min(router.next_due() for router in self._routers)

    def tokens_to_transfer(self, number: int) -> int:
        """Returns the prompt tokens that the rank of a request receives; 0 if it computes the prompt itself."""
        return self._routers[self._home[number]].tokens_to_transfer(number)

    def progress(self, number: int, generated: int, *, finished: bool) -> None:
        """Notes the output of a request so far."""
        self._routers[self._home[number]].progress(number, generated, finished=finished)

    def lost(self, number: int) -> None:
        """Notes that the engine of a request has restarted."""
        self._routers[self._home[number]].lost(number)

    def _dealt(self, prompt: Prompt) -> int:
        replicas = len(self._routers)
        if replicas == 1:
            return 0
        if self._split is None:
            return self._deal.randrange(replicas)
        return self._split.shard(prompt.sequence_hashes) % replicas

    def _hear(self, now: float) -> None:
        for link, receiver in self._links:
            for at, announcement in link.known_by(now):
                self._hearing_at = at
                receiver.hear(announcement)
        self._hearing_at = None

    def _teller(self, links: Sequence[Link]) -> Callable[[Announcement], None]:
        def announce(announcement: Announcement) -> None:
            for link in links:
                link.announce(
                    announcement, self._clock(), is_lost=self._loss > 0 and self._losses.random() < self._loss
                )

        return announce

    def _now(self) -> float:
        return self._clock() if self._hearing_at is None else self._hearing_at
