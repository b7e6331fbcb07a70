"""Receives load reports over NATS. While NATS is away, only booked load is known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from kvrouter.net.decoding import Quarantine, Undecodable
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

log = structlog.get_logger(component="scheduler")


class LoadListener:
    """Subscribes to the load reports of every component. ``run`` must be running."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Client]],
        directory: Directory,
        pools: Pools,
        metrics: SchedulerMetrics,
        clock: Callable[[], float],
        quarantine: Quarantine | None = None,
    ) -> None:
        """Does not connect yet. ``connect`` returns the connection once NATS is reachable."""
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self._connect = connect
        self._directory = directory
        self._pools = pools
        self._metrics = metrics
        self._clock = clock
        self._subscriptions: dict[ComponentName, Subscription] = {}

    @property
    def listening(self) -> bool:
        """Whether the reports of every component are subscribed to."""
        return all(pool.name in self._subscriptions for pool in self._pools)

    async def run(self) -> None:
        """Follows the components until cancelled."""
        client = await self._connect()
        async for directory in self._directory.changes():
            for gone in self._subscriptions.keys() - directory.components.keys():
                await self._subscriptions.pop(gone).unsubscribe()
            for name in directory.components.keys() - self._subscriptions.keys():
                self._subscriptions[name] = await client.subscribe(name.load_wildcard, cb=self._taker(name))
                log.debug("load_report.subscribed", component_name=str(name))

    def take(self, name: ComponentName, encoded: bytes, subject: str = "") -> None:
        """Applies an encoded report of a component's rank; ``subject`` is the subject it arrived on."""
        pool = self._pools.get(name)
        refused = pool.reports.take(encoded, self._clock()) if pool is not None else "unknown_component"
        if refused:
            self._metrics.reports_quarantined.labels(reason=refused).inc()
            log.debug("load_report.quarantined", reason=refused, component_name=str(name))
            if refused == "unparsable":
                self._quarantine.reject("nats", subject, Undecodable(refused, "expected an encoded LoadReport"))

    def _taker(self, name: ComponentName) -> Callable[[Msg], Awaitable[None]]:
        async def take(message: Msg) -> None:
            self.take(name, message.data, message.subject)

        return take
