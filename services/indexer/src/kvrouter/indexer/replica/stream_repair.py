"""Detects a stopped stream of a component, and recreates it.

nats-server stops a stream at its first failed write, for example on a full disk, and does not resume it when the disk
has space again (``kvrouter.net.nats.event_stream.write_error``). A restart of the server helps. Recreating the stream
with the same configuration helps too, and frees its disk space. A replica's unread messages are lost: they show as
gaps, and are fetched from the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import replace

import structlog
from kvrouter.indexer.ingest.jetstream import AWAY as NATS_AWAY
from kvrouter.indexer.snapshots.coordinator import SnapshotHome
from kvrouter.indexer.snapshots.lock import LockLost
from kvrouter.net.etcd import AWAY as ETCD_AWAY
from kvrouter.net.nats.event_stream import write_error
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

log = structlog.get_logger(component="indexer")

_CHECK_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 300.0
_SERVER_METADATA = "_nats."


class StreamRepair:
    """Repairs the stream of one component; ``run`` checks it.

    One replica at a time recreates the stream, under the component's snapshot lock. If the new stream stops too,
    because the disk is still full, the pause before the next attempt doubles, up to five minutes.
    """

    def __init__(self, js: JetStreamContext, name: ComponentName, home: SnapshotHome) -> None:
        """Prepares to check; ``home`` gives the etcd endpoints and the replica id for the lock."""
        self._js = js
        self._name = name
        self._home = home
        self._unfinished: StreamConfig | None = None
        self._pause = 0.0
        self._next_try = 0.0
        self._log = log.bind(component_name=str(name))
        self.error = ""
        """Why the stream is stopped; empty if it is not, or if its state is unknown."""
        self.recreated = 0
        """How often this replica recreated the stream."""

    async def run(self, suspect: Callable[[], bool]) -> None:
        """Checks the stream every 2 s while ``suspect`` returns True, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            try:
                if suspect() or self.error or self._unfinished:
                    await self._check()
                elif time.monotonic() > self._next_try:
                    self._pause = 0.0
            except LockLost as error:
                self._log.info("stream.not_recreated", reason=str(error))
            except (*NATS_AWAY, *ETCD_AWAY) as error:
                self._log.warning("stream.check_failed", error=repr(error))

    async def _check(self) -> None:
        error = await write_error(self._js, self._name.stream)
        if error and not self.error:
            self._log.error(
                "stream.stopped",
                stream=self._name.stream,
                error=error,
                consequence="ranks are read from their workers, and the stream is recreated",
                advice="free disk space for JetStream",
            )
        if self.error and not error:
            self._log.info("stream.resumed", stream=self._name.stream)
        self.error = error
        now = time.monotonic()
        if (error or self._unfinished) and now >= self._next_try:
            self._pause = min(_LONGEST_PAUSE_SECONDS, max(_CHECK_SECONDS, 2 * self._pause))
            self._next_try = now + self._pause * random.uniform(1.0, 1.5)
            await self._recreate()

    async def _recreate(self) -> None:
        async with self._home.locked(self._name):
            # Another replica may have recreated it just now.
            if self._unfinished is None and not await write_error(self._js, self._name.stream):
                return
            if self._unfinished is None:
                config = (await self._js.stream_info(self._name.stream)).config
                own = {
                    key: text for key, text in (config.metadata or {}).items() if not key.startswith(_SERVER_METADATA)
                }
                self._unfinished = replace(config, metadata=own or None)
            await self._replace(self._unfinished)
            self._unfinished, self.error = None, ""
            self.recreated += 1
            self._log.warning("stream.recreated", stream=self._name.stream)

    async def _replace(self, config: StreamConfig) -> None:
        """Deletes the stream and creates it with the same limits, even if a publisher creates it at the same time."""
        if await write_error(self._js, self._name.stream):
            with contextlib.suppress(NotFoundError):
                await self._js.delete_stream(self._name.stream)
        try:
            await self._js.add_stream(config)
        except BadRequestError:
            # A publisher has created it first, with the default limits.
            await self._js.update_stream(config)
