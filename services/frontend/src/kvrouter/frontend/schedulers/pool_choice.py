"""Chooses among the components that can serve one request: several pools of one model and stage.

Each component's Scheduler names its cheapest rank and that rank's cost, without a booking. The request goes to the
component where

1. the Scheduler has a rank for it at all,
2. the conversation's previous request went to that rank,
3. the request would not be queued,
4. the cost is lowest (in the policy's unit, blocks counted in tokens).

Equal costs, and policies without a cost, leave the choice to chance, in proportion to the numbers of workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.frontend.schedulers.session_link import HEARTBEAT_TIMEOUT_SECONDS
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.common_pb2 import RoutingRequest
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest

_Rating = tuple[bool, bool, bool, float, float]
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
        limit = deadline.within(HEARTBEAT_TIMEOUT_SECONDS)
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
            return (True, False, False, 0.0, chance)
        return (False, not selection.keeps_conversation, selection.would_queue, selection.cost, chance)
