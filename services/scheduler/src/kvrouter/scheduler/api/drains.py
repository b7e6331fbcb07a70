"""Drains workers: the registry stores which ones, so all Schedulers and Frontends stop sending them requests.

The directory marks their registrations as draining (``kvrouter.runtime.discovery.registry_views``).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog
from kvrouter.net.etcd import AWAY, EtcdAccess, connect
from kvrouter.net.local import LocalRegistry
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import component_name
from kvrouter.scheduler.load.pools import Components
from kvrouter.v1 import scheduler_pb2 as pb
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import BadRequest, DependencyAway, UnknownComponent, UnknownWorker
from kvrouter.v1.registry_pb2 import WorkerDrain

log = structlog.get_logger(component="scheduler")


@dataclass(eq=False)
class Drains:
    """Writes the drains of workers.

    ``store`` keeps them: etcd, or the registry of a system in one process; None for a system whose workers are listed.
    """

    directory: Components
    store: EtcdAccess | LocalRegistry | None

    async def drain(self, request: pb.DrainWorkerRequest) -> pb.DrainWorkerResponse:
        """Drains a registered worker. A repeated call replaces the time of the migration.

        Raises:
            BadRequest, UnknownComponent, UnknownWorker, DependencyAway.
        """
        view = self._view(request.component)
        if request.worker_id not in view.workers:
            raise UnknownWorker(request.worker_id, view.workers)
        now = time.time_ns()
        drain = WorkerDrain(requested_unix_ns=now)
        if "migrate_after_ms" in request:
            drain.migrate_unix_ns = min(now + request.migrate_after_ms * 1_000_000, (1 << 64) - 1)
        was_draining = await self._write(view, request.worker_id, drain)
        migrate_after = request.migrate_after_ms if "migrate_after_ms" in request else None
        log.info(
            "worker.drained", worker=request.worker_id, component_name=str(view.name), migrate_after_ms=migrate_after
        )
        return pb.DrainWorkerResponse(was_draining=was_draining)

    async def undrain(self, request: pb.UndrainWorkerRequest) -> pb.UndrainWorkerResponse:
        """Ends the drain of a worker, registered or not.

        Raises:
            BadRequest, UnknownComponent, UnknownWorker, DependencyAway.
        """
        view = self._view(request.component)
        if not await self._write(view, request.worker_id, None):
            if request.worker_id not in view.workers:
                raise UnknownWorker(request.worker_id, view.workers)
            return pb.UndrainWorkerResponse(was_draining=False)
        log.info("worker.undrained", worker=request.worker_id, component_name=str(view.name))
        return pb.UndrainWorkerResponse(was_draining=True)

    def _view(self, component: Component) -> ComponentView:
        name = component_name(component)
        view = self.directory.components.get(name)
        if view is None:
            raise UnknownComponent(name, self.directory.components)
        return view

    async def _write(self, view: ComponentView, worker_id: int, drain: WorkerDrain | None) -> bool:
        """Stores or removes a drain. Returns whether there was one."""
        if self.store is None:
            raise BadRequest(
                "workers that are listed cannot be drained, because there is no etcd",
                field="worker_id",
                advice="Take the worker out of --static-workers, or stop it.",
            )
        name = view.name.drain_key(worker_id)
        if isinstance(self.store, LocalRegistry):
            return _replace(self.store, name, drain)
        key = name.encode()
        try:
            async with connect(self.store) as client:
                stored = await client.get(key)
                if drain is not None:
                    await client.put(key, drain.SerializeToString())
                elif stored is not None:
                    await client.delete(key)
        except AWAY as error:
            raise DependencyAway(f"etcd is unreachable, nothing has changed: {error}") from None
        return stored is not None


def _replace(registry: LocalRegistry, name: str, drain: WorkerDrain | None) -> bool:
    was_stored = registry.get(name) is not None
    if drain is None:
        registry.delete(name)
    else:
        registry.put(name, drain.SerializeToString())
    return was_stored
