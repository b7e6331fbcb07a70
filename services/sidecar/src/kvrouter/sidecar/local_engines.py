"""The engines of a process that routes to them itself: they come and go while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import structlog
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.relay.relaying import RelayedRanks
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.net.local import LocalSystem
from kvrouter.sidecar.engine_options import options_of_local_engine
from kvrouter.sidecar.engines_file import engines_in, read_engines
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
        self._wanted: set[str] = set()
        self._followed: dict[str, asyncio.Task[None]] = {}
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
        is_begun = len(self._supervisors) == len(self._followed)
        return is_begun and all(each.is_settled for each in self._supervisors)

    @property
    def worker_keys(self) -> set[str]:
        """Keys of the workers' registrations."""
        return {each.worker_key for each in self._supervisors} - {""}

    def add(self, url: str) -> bool:
        """Follows an engine from now on. Returns False if it is followed already."""
        url = url.rstrip("/")
        if url in self._wanted:
            return False
        self._wanted.add(url)
        if url not in self._followed:
            self._followed[url] = self._tasks.create_task(self._follow(url), name=f"engine {url}")
            self._followed[url].add_done_callback(lambda _: self._followed.pop(url))
        return True

    def remove(self, url: str) -> bool:
        """Takes an engine out: it gets no more requests, and leaves after its running ones.

        Returns False if it is not followed.
        """
        url = url.rstrip("/")
        if url not in self._wanted:
            return False
        self._wanted.discard(url)
        for supervisor in self._supervisors:
            if supervisor.options.url == url:
                supervisor.stop()
        return True

    async def follow_file(self, path: Path) -> None:
        """Adds and removes engines as a file names them, for ever. Those of the options stay."""
        fixed = {url.rstrip("/") for url in self._settings.engine}
        async with aclosing(engines_in(path)) as changes:
            async for urls in changes:
                for url in self._wanted - fixed - set(urls):
                    self.remove(url)
                for url in urls:
                    self.add(url)

    async def close(self) -> None:
        """Takes all engines out, and waits until they have left."""
        for url in list(self._wanted):
            self.remove(url)
        if self._followed:
            await asyncio.wait(list(self._followed.values()))

    async def _follow(self, url: str) -> None:
        # An engine that is added again while it leaves is followed anew when it has left.
        while url in self._wanted:
            options = options_of_local_engine(self._settings, url)
            http = EngineHttp(
                self._session,
                options.url,
                key_headers=partial(self._keys.headers, self._settings.component),
                answer_seconds=self._settings.answer_seconds,
            )
            supervisor = EngineSupervisor(options, http, _ignore_readiness, self._workers)
            self._relayed[options.worker_id] = supervisor.relayed
            self._supervisors.append(supervisor)
            log.info("engine.added", url=options.url, worker_id=options.worker_id)
            # A task of its own: a supervisor that is stopped while it waits for its engine cancels its task.
            following = self._tasks.create_task(supervisor.run(), name=f"supervisor of {url}")
            await asyncio.wait({following})
            self._supervisors.remove(supervisor)
            del self._relayed[options.worker_id]
            log.info("engine.removed", url=options.url, worker_id=options.worker_id)


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
        following: asyncio.Task[None] | None = None
        for url in settings.engine:
            engines.add(url)
        if settings.engines_file is not None:
            for url in await asyncio.to_thread(read_engines, settings.engines_file):
                engines.add(url)
            following = tasks.create_task(engines.follow_file(settings.engines_file), name="engines file")
        try:
            yield engines
        finally:
            if following is not None:
                following.cancel()
            await engines.close()


def _ignore_readiness(ready: bool) -> None:
    """The registry says whether an engine takes requests."""
