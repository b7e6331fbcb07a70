"""The engines of a process, each followed by a supervisor: they come and go while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
import structlog
from kvrouter.engines.keys import EngineKeys
from kvrouter.engines.relay.metrics import RelayMetrics
from kvrouter.engines.relay.relaying import RelayedRanks
from kvrouter.engines.servers.http import EngineHttp
from kvrouter.publisher.registration import System
from kvrouter.runtime.process.lifecycle import StartRefused
from kvrouter.sidecar.engine_options import EngineOptions
from kvrouter.sidecar.kubernetes.pods import FoundEngine
from kvrouter.sidecar.kubernetes.selection import PodSelection, PoolName
from kvrouter.sidecar.metrics import SidecarMetrics
from kvrouter.sidecar.settings import EngineSettings
from kvrouter.sidecar.supervisor import EngineSupervisor
from prometheus_client import CollectorRegistry

if TYPE_CHECKING:
    from kvrouter.sidecar.kubernetes.discovery import PodDiscovery

log = structlog.get_logger(component="engines")

POD_SOURCE = "engine-pods"
"""Name of the pods as a source of engines."""


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
        self._wanted: dict[str, FoundEngine] = {}
        self._followed: dict[str, asyncio.Task[None]] = {}
        self._sources: list[asyncio.Task[None]] = []
        self._named: dict[str, dict[str, FoundEngine]] = {}
        """The engines of each source, by URL."""
        self._unheard = 0
        """Sources that have not named their engines yet."""
        self._relayed: dict[int, RelayedRanks] = {}
        self.supervisors: list[EngineSupervisor] = []
        """What follows each engine."""
        SidecarMetrics(registry, self.supervisors)
        RelayMetrics(registry, self._relayed)

    @property
    def are_settled(self) -> bool:
        """Whether each engine has become a worker and published what it has cached, or could not become one yet."""
        return not self._unheard and all(each.is_settled for each in self.supervisors)

    @property
    def worker_keys(self) -> set[str]:
        """Keys of the workers' registrations."""
        return {each.worker_key for each in self.supervisors} - {""}

    def add(self, engine: FoundEngine) -> bool:
        """Follows an engine from now on. Returns False if it is followed already."""
        url = engine.url
        if url in self._wanted:
            return False
        self._wanted[url] = engine
        if url not in self._followed:
            following = self._follow(url, self._supervisor(url))
            self._followed[url] = self._tasks.create_task(following, name=f"engine {url}")
        return True

    def remove(self, url: str) -> bool:
        """Takes an engine out: it gets no more requests, and leaves after its running ones.

        Returns False if it is not followed.
        """
        if self._wanted.pop(url, None) is None:
            return False
        for supervisor in self.supervisors:
            if supervisor.options.name == url:
                supervisor.stop()
        return True

    def follow(self, source: str, changes: AsyncGenerator[Collection[FoundEngine]]) -> None:
        """Adds and removes engines as a source names them, until ``close``. Those of the options stay.

        Args:
            source: Name of the source.
            changes: Yields all its engines, at the beginning and after each change.
        """
        self._unheard += 1
        self._sources.append(self._tasks.create_task(self._follow_source(source, changes), name=source))

    async def close(self) -> None:
        """Takes all engines out, and waits until they have left."""
        for source in self._sources:
            source.cancel()
        for url in list(self._wanted):
            self.remove(url)
        if self._followed:
            await asyncio.wait(list(self._followed.values()))

    async def _follow_source(self, source: str, changes: AsyncGenerator[Collection[FoundEngine]]) -> None:
        fixed = {url.rstrip("/") for url in self._settings.engine}
        async with aclosing(changes):
            async for found in changes:
                engines = {each.url: each for each in found if each.url not in fixed}
                before = self._named.get(source)
                self._named[source] = engines
                for url in dict.fromkeys([*(before or ()), *engines]):
                    self._follow_or_leave(url)
                if before is None:
                    self._unheard -= 1
                    self._on_ready(source, True)

    def _follow_or_leave(self, url: str) -> None:
        """Follows an engine as long as a source names it. A source that knows of its restarts is the one to believe."""
        named = [engines[url] for engines in self._named.values() if url in engines]
        if named:
            self._take(max(named, key=lambda each: bool(each.incarnation)))
        else:
            self.remove(url)

    def _take(self, engine: FoundEngine) -> None:
        """Follows an engine that is ready, anew if it has restarted. One that ceases to be ready stays followed."""
        known = self._wanted.get(engine.url)
        if known == engine:
            return
        if known is not None and known.incarnation != engine.incarnation:
            self.remove(engine.url)
        if engine.url in self._wanted:
            self._wanted[engine.url] = engine
            for supervisor in self.supervisors:
                if supervisor.options.name == engine.url:
                    supervisor.set_wanted(engine.is_ready)
        elif engine.is_ready:
            self.add(engine)

    def _supervisor(self, url: str) -> EngineSupervisor:
        engine = self._wanted[url]
        options = replace(self._options_of(url), incarnation=engine.incarnation)
        http = EngineHttp(
            self._session,
            options.url,
            key_headers=partial(self._keys.headers, options.component),
            answer_seconds=self._settings.answer_seconds,
        )
        supervisor = EngineSupervisor(options, http, partial(self._on_ready, url), self._system)
        supervisor.set_wanted(engine.is_ready)
        self._relayed[options.worker_id] = supervisor.relayed
        self.supervisors.append(supervisor)
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
                self.supervisors.remove(supervisor)
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
        settings: The engines, and the options for them.
        options_of: Returns the options of the engine at a URL.
        registry: Registry for the metrics of engines.
        on_ready: Called with an engine's URL when it begins or ceases to take requests, and with the name of a source
            when it has named its engines for the first time.
        system: Where workers register and publish; by default the etcd and the NATS of the settings.

    Raises:
        KeyTaken: another process registered the same worker.
        StartRefused: the settings name pods, and the client of Kubernetes is not installed.
    """
    # Each running request has a connection of its own.
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session,
        asyncio.TaskGroup() as tasks,
    ):
        engines = FollowedEngines(settings, options_of, on_ready, system, session, tasks, registry)
        for url in settings.engine:
            engines.add(FoundEngine(url.rstrip("/")))
        discovering: asyncio.Task[None] | None = None
        if settings.pods is not None:
            discovery = _discovery(settings.pods, registry)
            discovering = tasks.create_task(discovery.run(), name="engine pods")
            engines.follow(POD_SOURCE, discovery.engines())
        try:
            yield engines
        finally:
            if discovering is not None:
                discovering.cancel()
            await engines.close()


def _discovery(pods: PodSelection | PoolName, registry: CollectorRegistry) -> PodDiscovery:
    # Imported only here, since its client is an extra.
    try:
        from kvrouter.sidecar.kubernetes.discovery import PodDiscovery
    except ModuleNotFoundError as error:
        raise StartRefused(
            f"--engine-pods and --inference-pool need {error.name}: install kvrouter[kubernetes]"
        ) from None
    return PodDiscovery(pods, registry)
