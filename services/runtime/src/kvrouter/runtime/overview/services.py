"""Queries all services of a system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import cast

import grpc.aio
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import SERVICES, Frontend, Indexer, Scheduler
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.runtime.overview.system import FrontendView, IndexerView, SchedulerView, System
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1.errors import KvRouterError, NotFound, PermissionDenied, Unauthenticated
from kvrouter.v1.frontend_pb2 import GetWorkerHealthRequest, GetWorkerHealthResponse
from kvrouter.v1.indexer_pb2 import GetStatsRequest
from kvrouter.v1.pages import all_pages, whole
from kvrouter.v1.scheduler_pb2 import Decision, ExplainRequest, GetStatusRequest

_CALL_SECONDS = 2.0
"""Deadline of each call, which limits the time of a look."""
_DECISIONS, _QUEUED = 50, 5


def registered_addresses(directory: Directory, kind: str, *, without: str = "") -> list[str]:
    """Returns the address, host:port, of every registered ``scheduler``, ``indexer`` or ``frontend``.

    ``without`` is the id of an instance to leave out.
    """
    # A service that was killed and restarted at its address is registered twice until the first lease expires.
    found = (each.endpoint for name, each in sorted(directory.services(kind).items()) if name != without)
    return list(dict.fromkeys(found))


@dataclass(eq=False)
class ServiceQueries:
    """Connections to the services of a system, opened when they are first queried."""

    addresses: Callable[[str], Sequence[str]]
    """Returns the addresses, host:port, of every ``scheduler``, ``indexer`` or ``frontend``."""
    note: Callable[[], str]
    """Returns why there is no service to query; empty if there is one."""
    tls: Callable[[], Tls | None]
    """Returns the TLS of the connections; None for plain text."""
    api_key: Callable[[], str] = str
    """Returns the API key of calls; empty for none."""
    local: Mapping[str, object] = field(default_factory=dict)
    """Services of this process by the address under which ``addresses`` lists them."""

    def __post_init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def sums(self) -> System:
        """Returns the current state as far as Schedulers know it, with sums over the ranks of each component."""
        schedulers, *_ = await self._registered()
        views = await asyncio.gather(*(self._ask_scheduler(each, GetStatusRequest(sums=True)) for each in schedulers))
        return System(datetime.now(UTC).astimezone(), views, (), (), self.note())

    async def look(self, *, asks_frontends: bool = True) -> System:
        """Returns the current state. A service that does not answer is reported and costs at most one deadline.

        Frontends not asked are listed as if they asked for a key; those of this process are always asked.
        """
        schedulers, indexers, frontends = await self._registered()
        scheduler_views, indexer_views, frontend_views = await asyncio.gather(
            asyncio.gather(
                *(
                    self._ask_scheduler(each, GetStatusRequest(decisions=_DECISIONS, queued_requests=_QUEUED))
                    for each in schedulers
                )
            ),
            asyncio.gather(*(self._ask_indexer(address) for address in indexers)),
            asyncio.gather(
                *(self._ask_frontend(address, may_ask=asks_frontends or address in self.local) for address in frontends)
            ),
        )
        return System(datetime.now(UTC).astimezone(), scheduler_views, indexer_views, frontend_views, self.note())

    async def explain(self, scheduler: str, decision_id: int) -> Decision:
        """Returns a past decision of the Scheduler at an address, with every candidate.

        Raises:
            NotFound: no such Scheduler is known, or it does not keep the decision any more.
            KvRouterError: the Scheduler does not answer.
        """
        if scheduler not in self.addresses("scheduler"):
            raise NotFound(f"no Scheduler at {scheduler!r} is known", advice="Reload the list of decisions.")
        stub = cast(Scheduler, self._stub("scheduler", scheduler))
        asked = ExplainRequest(decision_id=decision_id)
        return (await stub.explain(asked, deadline=Deadline.after(_CALL_SECONDS))).decision

    async def close(self) -> None:
        """Closes all connections."""
        await self._close(list(self._channels))

    async def _registered(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        """Returns the addresses of Schedulers, Indexers and Frontends, and closes the connections to others."""
        schedulers, indexers, frontends = map(self.addresses, ("scheduler", "indexer", "frontend"))
        await self._close(self._channels.keys() - {*schedulers, *indexers, *frontends})
        return schedulers, indexers, frontends

    async def _ask_scheduler(self, address: str, request: GetStatusRequest) -> SchedulerView:
        scheduler = cast(Scheduler, self._stub("scheduler", address))
        deadline = Deadline.after(_CALL_SECONDS)
        try:
            status = await whole(lambda asked: scheduler.get_status(asked, deadline=deadline), request)
            return SchedulerView(address, status)
        except KvRouterError as error:
            return SchedulerView(address, failure=_why(error))

    async def _ask_indexer(self, address: str) -> IndexerView:
        indexer = cast(Indexer, self._stub("indexer", address))
        try:
            deadline = Deadline.after(_CALL_SECONDS)
            stats = await whole(lambda asked: indexer.get_stats(asked, deadline=deadline), GetStatsRequest())
            return IndexerView(address, stats)
        except KvRouterError as error:
            return IndexerView(address, failure=_why(error))

    async def _ask_frontend(self, address: str, *, may_ask: bool) -> FrontendView:
        if not may_ask:
            return FrontendView(address, asks_for_key=True)
        frontend = cast(Frontend, self._stub("frontend", address))
        try:
            deadline = Deadline.after(_CALL_SECONDS)
            pages = all_pages(
                lambda asked: frontend.get_worker_health(asked, deadline=deadline), GetWorkerHealthRequest()
            )
            workers = [worker async for page in pages for worker in page.workers]
            return FrontendView(address, GetWorkerHealthResponse(workers=workers))
        except (Unauthenticated, PermissionDenied):
            return FrontendView(address, asks_for_key=True)
        except KvRouterError as error:
            return FrontendView(address, failure=_why(error))

    def _stub(self, role: str, address: str) -> object:
        if address in self.local:
            return self.local[address]
        channel = self._channels.get(address)
        if channel is None:
            channel = open_channel(address, tls=self.tls(), role=role, api_key=self.api_key())
            self._channels[address] = channel
        return remote(SERVICES[role], channel)

    async def _close(self, addresses: Iterable[str]) -> None:
        for address in list(addresses):
            await self._channels.pop(address).close()


def _why(error: KvRouterError) -> str:
    """Returns the reason of a failed call, for a failed connection only its last part: ``Connection refused``."""
    words = error.message
    return words.rpartition(": ")[2] if error.code is grpc.StatusCode.UNAVAILABLE else words
