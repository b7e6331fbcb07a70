"""The engines of a process, each followed by a supervisor: they come and go while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

import aiohttp
import structlog
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.relay.relaying import RelayedRanks
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.publisher.registration import System
from kvrouter.sidecar.engine_options import EngineOptions
from kvrouter.sidecar.metrics import SidecarMetrics
from kvrouter.sidecar.settings import EngineSettings
from kvrouter.sidecar.supervisor import EngineSupervisor
from prometheus_client import CollectorRegistry

log = structlog.get_logger(component="engines")


class FollowedEngines:
    """Follows engines, each in a task of its own. ``following_engines`` creates it."""

    def __init__(
        self,
        settings: EngineSettings,
        options_of: Callable[[str], EngineOptions],
        on_ready: Callable[[str, bool], None],
        system: System | None,
        session: aiohttp.ClientSession,
        tasks: asyncio.TaskGroup,
        registry: CollectorRegistry,
    ) -> None:
        """``session`` reaches the engines, ``tasks`` owns what follows them; the rest is as in following_engines."""
        self._settings = settings
        self._options_of = options_of
        self._on_ready = on_ready
        self._system = system
        self._session = session
        self._tasks = tasks
        self._keys = EngineKeys(settings.engine_keys_file)
        self._wanted: set[str] = set()
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._sources: list[asyncio.Task[None]] = []
        self._unheard = 0
        """Sources that have not named their engines yet."""
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
        return not self._unheard and all(each.is_settled for each in self._supervisors)

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
            following = self._follow(url, self._supervisor(url))
            self._followed[url] = self._tasks.create_task(following, name=f"engine {url}")
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

    def follow(self, changes: AsyncGenerator[Collection[str]]) -> None:
        """Adds and removes engines as a source names them, until ``close``. Those of the options stay.

        Args:
            changes: Yields the URLs of all engines of the source, at the beginning and after each change.
        """
        self._unheard += 1
        self._sources.append(self._tasks.create_task(self._follow_source(changes), name="source of engines"))

    async def close(self) -> None:
        """Takes all engines out, and waits until they have left."""
        for source in self._sources:
            source.cancel()
        for url in list(self._wanted):
            self.remove(url)
        if self._followed:
            await asyncio.wait(list(self._followed.values()))

    async def _follow_source(self, changes: AsyncGenerator[Collection[str]]) -> None:
        fixed = {url.rstrip("/") for url in self._settings.engine}
        named: set[str] | None = None
        async with aclosing(changes):
            async for urls in changes:
                if named is None:
                    self._unheard -= 1
                for url in (named or set()) - fixed - set(urls):
                    self.remove(url)
                for url in urls:
                    self.add(url)
                named = set(urls)

    def _supervisor(self, url: str) -> EngineSupervisor:
        options = self._options_of(url)
        http = EngineHttp(
            self._session,
            options.url,
            key_headers=partial(self._keys.headers, self._settings.component),
            answer_seconds=self._settings.answer_seconds,
        )
        supervisor = EngineSupervisor(options, http, partial(self._on_ready, url), self._system)
        self._relayed[options.worker_id] = supervisor.relayed
        self._supervisors.append(supervisor)
        log.info("engine.added", url=options.url, worker_id=options.worker_id)
        return supervisor

    async def _follow(self, url: str, supervisor: EngineSupervisor) -> None:
        """Runs an engine's supervisor, and another one if the engine is added again while it leaves."""
        try:
            while True:
                # A task of its own: a supervisor that is stopped while it waits for its engine cancels its task.
                following = self._tasks.create_task(supervisor.run(), name=f"supervisor of {url}")
                await asyncio.wait({following})
                options = supervisor.options
                self._supervisors.remove(supervisor)
                del self._relayed[options.worker_id]
                log.info("engine.removed", url=options.url, worker_id=options.worker_id)
                if url not in self._wanted:
                    return
                supervisor = self._supervisor(url)
        finally:
            del self._followed[url]


@asynccontextmanager
async def following_engines(
    settings: EngineSettings,
    options_of: Callable[[str], EngineOptions],
    registry: CollectorRegistry,
    on_ready: Callable[[str, bool], None] = lambda _url, _ready: None,
    system: System | None = None,
) -> AsyncIterator[FollowedEngines]:
    """Follows the engines of the settings while the context lasts. Those that are not ready yet join later.

    Args:
        settings: The engines, and what is said of them.
        options_of: Returns the options of the engine at a URL.
        registry: Registry for the metrics of engines.
        on_ready: Called with an engine's URL when it begins or ceases to take requests.
        system: Where workers register and publish; by default the etcd and the NATS of the settings.

    Raises:
        KeyTaken: another process registered the same worker.
    """
    # Each running request has a connection of its own.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
        asyncio.TaskGroup() as tasks,
    ):
        engines = FollowedEngines(settings, options_of, on_ready, system, session, tasks, registry)
        for url in settings.engine:
            engines.add(url)
        try:
            yield engines
        finally:
            await engines.close()
