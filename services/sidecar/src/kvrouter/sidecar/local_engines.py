"""The engines of a process that routes to them itself: they come and go while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

import aiohttp
import structlog
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.relay.relaying import RelayedRanks
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.net.local import LocalSystem
from kvrouter.sidecar.engine_options import options_of_local_engine
from kvrouter.sidecar.local_system import LocalWorkers
from kvrouter.sidecar.metrics import SidecarMetrics
from kvrouter.sidecar.settings import LocalEnginesSettings
from kvrouter.sidecar.supervisor import EngineSupervisor
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="engines")


class LocalEngines:
    """Follows engines, each in a task of its own. ``serving_engines`` creates it."""

    def __init__(
        self,
        settings: LocalEnginesSettings,
        workers: LocalWorkers,
        session: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        registry: CollectorRegistry,
    ) -> None:
        """``workers`` is the system that they join, ``session`` reaches them, ``tasks`` owns what follows them."""
        self._settings = settings
        self._workers = workers
        self._session = session
        self._tasks = tasks
        self._keys = EngineKeys(settings.engine_keys_file)
        self._followed: dict[str, tuple[EngineSupervisor, asyncio.Task[None]]] = {}
        self._relayed: dict[int, RelayedRanks] = {}
        self._supervisors: list[EngineSupervisor] = []
        SidecarMetrics(registry, self._supervisors)
        RelayMetrics(registry, self._relayed)

    @property
    def supervisors(self) -> Sequence[EngineSupervisor]:
        """What follows each engine."""
        return self._supervisors

    @property
    def are_settled(self) -> bool:
        """Whether each engine has become a worker and published what it has cached, or could not become one yet."""
        return all(each.is_settled for each in self._supervisors)

    @property
    def worker_keys(self) -> set[str]:
        """Keys of the workers' registrations."""
        return {each.worker_key for each in self._supervisors} - {""}

    def add(self, url: str) -> bool:
        """Follows an engine from now on. Returns False if it is followed already."""
        options = options_of_local_engine(self._settings, url)
        if options.url in self._followed:
            return False
        http = EngineHttp(
            self._session,
            options.url,
            key_headers=partial(self._keys.headers, self._settings.component),
            answer_seconds=self._settings.answer_seconds,
        )
        supervisor = EngineSupervisor(options, http, _ignore_readiness, self._workers)
        self._relayed[options.worker_id] = supervisor.relayed
        self._supervisors.append(supervisor)
        self._followed[options.url] = supervisor, self._tasks.create_task(supervisor.run(), name=f"engine {url}")
        log.info("engine.added", url=options.url, worker_id=options.worker_id)
        return True

    async def remove(self, url: str) -> bool:
        """Takes an engine out, after its running requests. Returns False if it is not followed."""
        found = self._followed.pop(url.rstrip("/"), None)
        if found is None:
            return False
        supervisor, following = found
        supervisor.stop()
        await asyncio.wait({following})
        self._supervisors.remove(supervisor)
        del self._relayed[supervisor.options.worker_id]
        log.info("engine.removed", url=supervisor.options.url, worker_id=supervisor.options.worker_id)
        return True

    async def close(self) -> None:
        """Takes all engines out."""
        async with asyncio.TaskGroup() as leaving:
            for url in list(self._followed):
                leaving.create_task(self.remove(url))


@asynccontextmanager
async def serving_engines(
    settings: LocalEnginesSettings, system: LocalSystem, registry: CollectorRegistry
) -> AsyncIterator[LocalEngines]:
    """Follows the engines of the settings while the context lasts. Those that are not ready yet join later."""
    # Each running request has a connection of its own.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
        asyncio.TaskGroup() as tasks,
    ):
        engines = LocalEngines(settings, LocalWorkers(system), session, tasks, registry)
        for url in settings.engine:
            engines.add(url)
        try:
            yield engines
        finally:
            await engines.close()


def _ignore_readiness(ready: bool) -> None:
    """The registry says whether an engine takes requests."""
