"""The links to the Schedulers of all components, and the choice among components that can serve one request.

There is one link per component, or one per shard if the component is sharded.

Each component's Scheduler names its cheapest rank and that rank's cost, without a booking. The request goes to the
component where

1. the Scheduler has a rank for it at all,
2. the request would not be queued,
3. the cost is lowest (in the policy's unit, blocks counted in tokens),
4. the conversation's previous request went to that rank.

The cost already counts the cached blocks that the conversation's previous request left on the rank, so the conversation
itself decides only between equal costs. Remaining ties, and policies without a cost, leave the choice to chance, in
proportion to the numbers of workers.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from kvrouter.core import sequence_hashes
from kvrouter.frontend.schedulers.scheduler_choice import SchedulerSource
from kvrouter.frontend.schedulers.scheduler_connection import SchedulerConnection
from kvrouter.frontend.schedulers.scheduler_link import ANSWER_SECONDS, HEARTBEAT_TIMEOUT_SECONDS, SchedulerLink
from kvrouter.frontend.schedulers.sharding import PrefixSplit, Sharding
from kvrouter.net import trace_context
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.errors import DependencyAway, KvRouterError
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest

_WHOLE = 0
"""Shard number of an unsharded component."""


class _Component:
    def __init__(self, sharding: bool | None) -> None:
        self.sharding = Sharding(sharding)
        self.split = PrefixSplit()
        self.links: dict[int, SchedulerLink] = {}


class SchedulerLinks:
    """Opens links when they are first needed and keeps them. ``run`` must be running."""

    def __init__(
        self,
        directory: Directory,
        source: SchedulerSource,
        *,
        instance_id: str,
        sharding: bool | None = None,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        tenant: Callable[[], tuple[str, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens no link yet.

        Args:
            directory: Discovered components.
            source: Finds the Schedulers of a component.
            instance_id: Id of this Frontend.
            sharding: Whether to shard requests: True, False, or None to follow the Scheduler's advice.
            heartbeat_timeout_seconds: Silence after which a Scheduler is replaced by another, in seconds.
            tenant: Returns tenant and weight of the caller of the running call; None without authentication.
            clock: Returns the time in seconds.
        """
        self._directory = directory
        self._tenant = tenant
        self._source = source
        self._instance_id = instance_id
        # A restarted Frontend with the same id does not own its former bookings, so its sessions need other ids.
        self._session_prefix = f"{instance_id}.{secrets.token_hex(4)}"
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._clock = clock
        self._components: defaultdict[ComponentName, _Component] = defaultdict(partial(_Component, sharding))
        self._group: asyncio.TaskGroup | None = None

    @property
    def live_bookings(self) -> int:
        """Number of bookings not yet freed, over all components."""
        return sum(link.live_bookings for component in self._components.values() for link in component.links.values())

    @property
    def most_waiting_updates(self) -> int:
        """Largest number of booking updates that one Scheduler has not acknowledged."""
        links = (link for component in self._components.values() for link in component.links.values())
        return max((link.waiting_updates for link in links), default=0)

    @property
    def sharded_components(self) -> int:
        """Number of components whose requests are sharded."""
        return sum(self._is_sharded(component) for component in self._components.values())

    def ready(self) -> bool:
        """Returns whether the link of every component with workers is ready."""
        components = self._directory.components.items()
        links = [self._components[name].links.get(_WHOLE) for name, view in components if view.workers]
        return all(link is not None and link.ready for link in links)

    def link(self, name: ComponentName, local_hashes: bytes, conversation_id: str = "") -> SchedulerLink:
        """Returns the link for a request.

        Args:
            name: The component.
            local_hashes: Packed u64, one for each full block of the prompt.
            conversation_id: Conversation of the request; empty for none.

        Raises:
            DependencyAway: ``run`` is not running, because this Frontend is starting or stopping.
        """
        component = self._components[name]
        shard = _WHOLE
        if self._is_sharded(component):
            shard = component.split.shard(sequence_hashes(local_hashes), conversation_id)
        return component.links.get(shard) or self._open(name, component, shard)

    def schedulers(self) -> list[Scheduler]:
        """Returns every live Scheduler."""
        return self._source.everyone()

    def deciding_schedulers(self) -> list[Scheduler]:
        """Returns the deciding Scheduler of each component, without duplicates."""
        picks = [self._pick(component) for component in self._directory.components]
        return [picked.scheduler for picked in dict(pick for pick in picks if pick is not None).values()]

    def scheduler(self, component: ComponentName) -> Scheduler:
        """Returns the deciding Scheduler of a component; one that does not answer only if there is no other.

        Raises:
            DependencyAway: no Scheduler is live.
        """
        pick = self._pick(component)
        if pick is None:
            raise DependencyAway(f"no Scheduler of {component} is registered and ready")
        return pick[1].scheduler

    async def run(self) -> None:
        """Keeps open links running, and opens one for each discovered component, until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                while True:
                    for name in self._directory.components:
                        if _WHOLE not in (component := self._components[name]).links:
                            self._open(name, component, _WHOLE)
                    await self._directory.changed()
            finally:
                self._group = None

    def _pick(self, name: ComponentName) -> tuple[str, SchedulerConnection] | None:
        known = self._components.get(name)
        link = None if known is None else known.links.get(_WHOLE)
        return self._source.pick(name, () if link is None else link.avoided)

    def _is_sharded(self, component: _Component) -> bool:
        return component.sharding.active(self._clock()) and self._source.count() > 1

    def _open(self, name: ComponentName, component: _Component, shard: int) -> SchedulerLink:
        if self._group is None:
            raise DependencyAway(f"this Frontend has no link to a Scheduler of {name}: it is starting or stopping")
        link = component.links[shard] = SchedulerLink(
            name,
            self._source,
            session_id=f"{self._session_prefix}.{name.name}" + (f".{shard}" if shard else ""),
            client_name=self._instance_id,
            shard=shard,
            heartbeat_timeout_seconds=self._heartbeat_timeout,
            tenant=self._tenant,
            on_sharding_advised=lambda: component.sharding.advise(self._clock()),
        )
        self._group.create_task(link.run(), name=f"scheduler-link {name} {shard}", context=trace_context.background())
        return link


_Rating = tuple[bool, bool, float, bool, float]
"""Sort key of components; the lowest is first."""


class PoolChoice:
    """Compares components by the answers of their Schedulers."""

    def __init__(self, links: SchedulerLinks, rng: Random | None = None) -> None:
        """``rng`` breaks ties."""
        self._links = links
        self._rng = rng or Random()

    async def cheapest_first(
        self, views: Sequence[ComponentView], routing: Callable[[ComponentView], RoutingRequest], deadline: Deadline
    ) -> list[ComponentView]:
        """Returns the components, the cheapest one first. No Scheduler is asked about a single one.

        Args:
            views: The components.
            routing: Returns the request as the Scheduler of a component receives it.
            deadline: Deadline of the request. A Scheduler that does not answer delays it by 2 seconds at most.
        """
        if len(views) <= 1:
            return list(views)
        limit = deadline.within(ANSWER_SECONDS)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._rate(view, routing(view), limit)) for view in views]
        ratings = [task.result() for task in asked]
        return [views[place] for place in sorted(range(len(views)), key=ratings.__getitem__)]

    async def _rate(self, view: ComponentView, routing: RoutingRequest, deadline: Deadline) -> _Rating:
        # The least of several exponential variates is each one with a probability in proportion to its rate.
        chance = self._rng.expovariate(len(view.workers) or 1e-9)
        try:
            scheduler = self._links.scheduler(view.name)
            selection = await scheduler.select_worker(
                SelectWorkerRequest(request=routing, compares=True), deadline=deadline
            )
        except KvRouterError:
            return (True, False, 0.0, False, chance)
        return (False, selection.would_queue, selection.cost, not selection.keeps_conversation, chance)
