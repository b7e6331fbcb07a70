"""Notices that a component's stream takes no messages, and makes it anew.

nats-server stops a stream at its first failed write, such as on a full disk, and leaves it stopped when the disk has
space again (``kvrouter.net.event_stream.write_error``). A restart of the server would help, and so does a stream of the
same configuration in its place, which frees the disk space of the former one too. What is lost with the former one are
messages that a replica has not read yet: they show as gaps, and come from the workers.
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
from kvrouter.indexer.ingest.jetstream import heed_cancellation
from kvrouter.indexer.snapshots.coordinator import SnapshotHome
from kvrouter.indexer.snapshots.lock import LockLost, acquired
from kvrouter.net.etcd import AWAY as ETCD_AWAY
from kvrouter.net.event_stream import write_error
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.api import StreamConfig
from nats.js.errors import BadRequestError, NotFoundError

log = structlog.get_logger(component="indexer")

_CHECK_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 300.0
_SERVER_METADATA = "_nats."


class StreamRepair:
    """The stream of one component, for one replica; ``run`` keeps it working.

    One replica acts, under the component's snapshot lock. Where the new stream stops too, because the disk is still
    full, the pause before the next one doubles, up to five minutes.
    """

    def __init__(self, js: JetStreamContext, name: ComponentName, home: SnapshotHome) -> None:
        """``home`` says where the lock is, and who asks for it."""
        self._js = js
        self._name = name
        self._home = home
        self._unfinished: StreamConfig | None = None
        self._pause = 0.0
        self._next_try = 0.0
        self._log = log.bind(component_name=str(name))
        self.error = ""
        """Why the stream takes no messages; empty where it does, or where that is not known."""
        self.recreated = 0
        """Times that it was made anew."""

    async def run(self, suspect: Callable[[], bool]) -> None:
        """Looks at the stream for as long as it is ``suspect``, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            heed_cancellation()
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
        found = await write_error(self._js, self._name.stream)
        if found and not self.error:
            self._log.error(
                "stream.stopped",
                stream=self._name.stream,
                error=found,
                consequence="ranks are read from their workers, and the stream is made anew",
                advice="free disk space for JetStream",
            )
        if self.error and not found:
            self._log.info("stream.resumed", stream=self._name.stream)
        self.error = found
        now = time.monotonic()
        if (found or self._unfinished) and now >= self._next_try:
            self._pause = min(_LONGEST_PAUSE_SECONDS, max(_CHECK_SECONDS, 2 * self._pause))
            self._next_try = now + self._pause * random.uniform(1.0, 1.5)
            await self._recreate()

    async def _recreate(self) -> None:
        options = self._home.options
        async with acquired(self._home.etcd, self._name, self._home.replica_id, options.lock_seconds):
            # Another replica may have done it in this moment.
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
        """Deletes the stream and makes it anew with its limits, also where somebody else makes one at the same time."""
        if await write_error(self._js, self._name.stream):
            with contextlib.suppress(NotFoundError):
                await self._js.delete_stream(self._name.stream)
        try:
            await self._js.add_stream(config)
        except BadRequestError:
            # A publisher was quicker, with the default limits.
            await self._js.update_stream(config)
