"""Looks at the system: at even intervals for the history, and when somebody reads the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from kvrouter.frontend.recording.popular_prefixes import PopularPrefix, PopularPrefixes
from kvrouter.frontend.schedulers.indexer_client import IndexerClient
from kvrouter.frontend.web.overview import decision, overview
from kvrouter.frontend.web.problems import problems
from kvrouter.frontend.web.traffic import INTERVAL_SECONDS, REST_SECONDS, History, Traffic
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.overview.ranks import HitWindow
from kvrouter.runtime.overview.services import ServiceQueries
from kvrouter.runtime.requests import set_local_hashes
from kvrouter.v1.common_pb2 import Role
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import FindMatchesRequest

_HIT_WINDOW_SECONDS = 60.0
_FRESH_SECONDS = 1.0
"""Age up to which a look is shown again, so many readers cost as much as one."""
_AGEING_SECONDS = 600.0
_PREFIXES = 12
_PREFIX_QUERY_SECONDS = 0.5
_ROLES = {Role.ROLE_PREFILL: "prefill", Role.ROLE_DECODE: "decode"}


class Observer:
    """The state of the system, for the page. ``run`` must be running."""

    def __init__(
        self,
        directory: Directory,
        queries: ServiceQueries,
        indexers: IndexerClient,
        prefixes: PopularPrefixes,
        traffic: Traffic,
        *,
        frontend_id: tuple[str, str],
        asks_frontends: bool,
    ) -> None:
        """Creates an observer.

        Args:
            directory: The components.
            queries: Queries the services.
            indexers: The Indexers.
            prefixes: Counts prefixes.
            traffic: Counts this Frontend's requests.
            frontend_id: Address of this Frontend in ``queries``, and its id.
            asks_frontends: Whether other Frontends answer without a key.
        """
        self._frontend_id = frontend_id
        self._asks_frontends = asks_frontends
        self._directory = directory
        self._queries = queries
        self._indexers = indexers
        self._prefixes = prefixes
        self._traffic = traffic
        self._history = History()
        self._hit_rates = HitWindow(_HIT_WINDOW_SECONDS)
        """Of the components, at even intervals."""
        self._rank_hit_rates = HitWindow(_HIT_WINDOW_SECONDS)
        """Of the ranks, when somebody reads the page."""
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._shown: dict[str, Any] = {}

    async def run(self) -> None:
        """Takes a sample every 10 seconds, and every 30 while nothing runs, until cancelled."""
        aged_at = time.monotonic()
        try:
            while True:
                self._traffic.take(time.monotonic())
                system = await self._queries.sums()
                now = time.monotonic()
                self._history.take(system, now)
                self._hit_rates.take(system, now)
                if time.monotonic() - aged_at >= _AGEING_SECONDS:
                    aged_at = time.monotonic()
                    self._prefixes.age()
                await asyncio.sleep(REST_SECONDS if self._history.at_rest else INTERVAL_SECONDS)
        finally:
            await self._queries.close()

    async def overview(self) -> dict[str, Any]:
        """Returns the state as JSON, at most a second old. Services that do not answer are named in it."""
        async with self._looking:
            if time.monotonic() - self._looked_at >= _FRESH_SECONDS:
                system = await self._queries.look(asks_frontends=self._asks_frontends)
                self._rank_hit_rates.take(system, time.monotonic())
                self._shown = overview(
                    system,
                    self._hit_rates,
                    self._rank_hit_rates,
                    history=self._history.points,
                    traffic=self._traffic.rates(time.monotonic()),
                    prefixes=await self._held_prefixes(),
                    found=problems(system, self._hit_rates),
                    roles={name: _ROLES.get(view.role, "both") for name, view in self._directory.components.items()},
                    frontend_ids=self._frontend_ids(),
                )
                self._looked_at = time.monotonic()
            return self._shown

    def _frontend_ids(self) -> dict[str, str]:
        registered = self._directory.services("frontend")
        return dict([*((each.endpoint, name) for name, each in registered.items()), self._frontend_id])

    async def decision(self, scheduler: str, decision_id: int) -> dict[str, Any]:
        """Returns a past decision with every candidate.

        Raises:
            KvRouterError: the Scheduler does not answer, or does not keep the decision any more.
        """
        return decision(await self._queries.explain(scheduler, decision_id), scheduler)

    async def _held_prefixes(self) -> Sequence[tuple[PopularPrefix, int | None]]:
        popular = self._prefixes.top(_PREFIXES)
        return list(zip(popular, await asyncio.gather(*map(self._ranks_with, popular)), strict=True))

    async def _ranks_with(self, prefix: PopularPrefix) -> int | None:
        """Returns how many ranks hold the whole prefix; None if no Indexer answers."""
        blocks = len(prefix.local_hashes) // 8
        for view in self._directory.components.values():
            if view.model != prefix.model:
                continue
            query = FindMatchesRequest(component=view.descriptor.component, block_size=view.block_size)
            set_local_hashes(query.local_hashes, prefix.local_hashes)
            try:
                indexer = await self._indexers.indexer(view.name)
                found = await indexer.find_matches(query, deadline=Deadline.after(_PREFIX_QUERY_SECONDS))
            except KvRouterError:
                return None
            return sum(held >= blocks for held in found.device_blocks)
        return None
