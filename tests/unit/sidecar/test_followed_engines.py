"""Engines that several sources name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from kvrouter.devtools.system.ports import free_port
from kvrouter.sidecar.engine_options import options_of_local_engine
from kvrouter.sidecar.followed_engines import FollowedEngines, following_engines
from kvrouter.sidecar.kubernetes.pods import FoundEngine
from kvrouter.sidecar.settings import LocalEnginesSettings
from prometheus_client import CollectorRegistry


class Source:
    """Names engines, and knows whether its last change was taken."""

    def __init__(self) -> None:
        self._changes: asyncio.Queue[list[FoundEngine]] = asyncio.Queue()

    async def changes(self) -> AsyncGenerator[list[FoundEngine]]:
        while True:
            yield await self._changes.get()
            self._changes.task_done()

    async def names(self, *engines: FoundEngine) -> None:
        """Names engines from now on, and waits until that was taken."""
        self._changes.put_nowait(list(engines))
        await self._changes.join()


@asynccontextmanager
async def following(*sources: Source) -> AsyncIterator[FollowedEngines]:
    settings = LocalEnginesSettings()
    options_of = partial(options_of_local_engine, settings)
    async with asyncio.timeout(30), following_engines(settings, options_of, CollectorRegistry()) as engines:
        for number, source in enumerate(sources):
            engines.follow(f"source {number}", source.changes())
        yield engines


async def test_an_engine_is_followed_once_while_any_source_names_it() -> None:
    file, pods = Source(), Source()
    url = f"http://127.0.0.1:{free_port()}"
    async with following(file, pods) as engines:
        await pods.names(FoundEngine(url, "uid/0"))
        (first,) = engines.supervisors
        await file.names(FoundEngine(url))
        await pods.names(FoundEngine(url, "uid/0"), FoundEngine("http://127.0.0.1:1", "uid/0"))
        await pods.names(FoundEngine(url, "uid/0"))
        await file.names()
        assert first in engines.supervisors, "the file does not know whether the engine has restarted"
        await file.names(FoundEngine(url))
        await pods.names(FoundEngine(url, "uid/1"))
        while [each.options.incarnation for each in engines.supervisors] != ["uid/1"]:
            await asyncio.sleep(0.01)
        await file.names()
        await pods.names()
        while engines.supervisors:
            await asyncio.sleep(0.01)
