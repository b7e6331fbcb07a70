"""One replica of the Indexer: an index for every component of the namespace, and its applied record in etcd."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace

import structlog
from kvrouter.indexer.ingest.jetstream import DurableConsumer
from kvrouter.indexer.replica.component import ComponentIndex, Limits
from kvrouter.indexer.snapshots.coordinator import SnapshotHome
from kvrouter.net.decoding import Quarantine
from kvrouter.net.etcd import LeasedKeys
from kvrouter.net.local import LocalKeys, LocalMessages, LocalStates
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.ticks import seconds_to_rest, tick
from kvrouter.runtime.discovery.directory import ComponentView, Directory
from kvrouter.v1.names import ComponentName, worker_id_of_key
from kvrouter.v1.registry_pb2 import AppliedRecord

log = structlog.get_logger(component="indexer")

_LOOK_SECONDS = 1.0
"""Interval of looking for components without an applied record."""
_RECORD_SECONDS = 5.0
"""Shortest time between two applied records. Every process of the system is told of each one."""


@dataclass(eq=False)
class Replica:
    """Starts and stops the indexes of components as these appear and disappear."""

    id: str
    """Id of this replica."""
    directory: Directory
    """Components and workers of the namespace."""
    connect: Callable[[], Awaitable[TolerantClient | LocalMessages]]
    """Returns where events arrive: the connection to NATS, once it is reachable, or this process itself."""
    keys: LeasedKeys | LocalKeys
    """Registrations with the lifetime of this process."""
    limits: Limits
    """Bounds of each component's index."""
    _: KW_ONLY
    fetches: int = 8
    """Maximum number of concurrent fetches from workers."""
    home: SnapshotHome | None = None
    """Settings for snapshots; None for no snapshots."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Counts and logs undecodable input."""
    states: LocalStates | None = None
    """What workers of this process resumed with."""

    def __post_init__(self) -> None:
        self.components: dict[ComponentName, ComponentIndex] = {}
        self.known = False
        """Whether the components of the namespace are known."""
        self._slots = asyncio.Semaphore(self.fetches)
        self._tasks: dict[ComponentName, asyncio.Task[None]] = {}
        self._recorded: dict[ComponentName, tuple[AppliedRecord, float]] = {}
        """The last record of each component, and when it was written, seconds of the monotonic clock."""

    @property
    def ready(self) -> bool:
        """Returns whether the components are known and all of them are restored."""
        return self.known and all(component.ready for component in self.components.values())

    @property
    def compared(self) -> bool:
        """Returns whether every registered rank was compared with its worker, as far as workers answer."""
        return self.known and all(
            (component := self.components.get(name)) is not None and component.has_compared(view.workers)
            for name, view in self.directory.components.items()
            if view.block_size
        )

    async def run(self) -> None:
        """Follows the components of the namespace until cancelled."""
        messages = await self.connect()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._record_applied(), name="applied records")
            async for directory in self.directory.changes():
                began = time.thread_time()
                await self._follow(group, messages, directory.components)
                # Thousands of workers that register one by one would take all of the time: each look is at all.
                await asyncio.sleep(seconds_to_rest(began))

    async def _follow(
        self,
        group: asyncio.TaskGroup,
        messages: TolerantClient | LocalMessages,
        views: Mapping[ComponentName, ComponentView],
    ) -> None:
        for name in [name for name in self.components if not self._is_same(name, views.get(name))]:
            await self._end(name)
        for name, view in views.items():
            if name not in self.components and view.block_size:
                log.info("component.found", component_name=str(name), block_size=view.block_size)
                consumer = None if isinstance(messages, LocalMessages) else DurableConsumer(messages, name, self.id)
                self.components[name] = ComponentIndex(
                    name,
                    view.descriptor,
                    messages,
                    consumer,
                    self.limits,
                    self._slots,
                    self.home,
                    self.quarantine,
                    self.directory.tls,
                    self.states,
                )
                self._tasks[name] = group.create_task(self.components[name].run(), name=f"component {name}")
            if name in self.components:
                self.components[name].update_workers(view.workers, self._unfit(name))
        self.known = True
        if self.home is not None and self.home.options.reset:
            # The reset at start does not apply to components that appear later or again.
            self.home = replace(self.home, options=replace(self.home.options, reset=False))

    def _is_same(self, name: ComponentName, view: ComponentView | None) -> bool:
        return view is not None and view.descriptor == self.components[name].descriptor

    def _unfit(self, name: ComponentName) -> frozenset[int]:
        """Returns the registered workers in conflict with the descriptor of their component."""
        ids = (worker_id_of_key(key) for key in self.directory.ignored if key.startswith(name.workers_prefix))
        return frozenset(worker_id for worker_id in ids if worker_id is not None)

    async def _end(self, name: ComponentName) -> None:
        log.info("component.removed", component_name=str(name))
        del self.components[name]
        self._recorded.pop(name, None)
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.wait({task})
        self.keys.delete(name.applied_key(self.id))

    async def _record_applied(self) -> None:
        while True:
            now = time.monotonic()
            for name, component in self.components.items():
                record = component.applied_record
                former, written_at = self._recorded.get(name, (None, -math.inf))
                if record and record != former and now - written_at >= _RECORD_SECONDS:
                    self._recorded[name] = record, now
                    self.keys.put(name.applied_key(self.id), record.SerializeToString())
            await tick(_LOOK_SECONDS)
