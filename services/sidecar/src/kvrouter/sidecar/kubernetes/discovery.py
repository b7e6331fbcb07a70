"""Finds engines by their pods: those of a label selector, or of an InferencePool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from functools import partial

import structlog
from kubernetes_asyncio.client import ApiClient, CoreV1Api, CustomObjectsApi
from kvrouter.sidecar.kubernetes.api_server import FollowedObjects, Listing
from kvrouter.sidecar.kubernetes.pods import FoundEngine, engines_of
from kvrouter.sidecar.kubernetes.selection import (
    POOL_GROUP,
    POOL_PLURAL,
    POOL_VERSION,
    JsonObject,
    PodSelection,
    PoolName,
    selection_of_pool,
)
from prometheus_client import CollectorRegistry, Gauge

log = structlog.get_logger(component="kubernetes")


class PodDiscovery:
    """The engines in the pods of a selection or a pool, while ``run`` runs."""

    def __init__(self, wanted: PodSelection | PoolName, registry: CollectorRegistry) -> None:
        self._wanted = wanted
        self._found: Collection[FoundEngine] = ()
        self._changed = asyncio.Event()
        self._followed: list[FollowedObjects[JsonObject] | FollowedObjects[tuple[FoundEngine, ...]]] = []
        pods = Gauge("kvrouter_engine_pods", "Engines in pods, ready or not.", registry=registry)
        pods.set_function(lambda: len(self._found))
        up = Gauge(
            "kvrouter_kubernetes_up",
            "1 while changes of the engines' pods arrive, 0 while the API server of Kubernetes is away or refuses.",
            registry=registry,
        )
        up.set_function(lambda: bool(self._followed) and all(each.is_current for each in self._followed))

    async def run(self) -> None:
        """Follows the pods for ever."""
        if isinstance(self._wanted, PodSelection):
            await self._follow_pods(self._wanted)
        else:
            await self._follow_pool(self._wanted)

    async def engines(self) -> AsyncGenerator[Collection[FoundEngine]]:
        """Yields all engines once they are known, and after each change, for ever."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self._found

    async def _follow_pods(self, selection: PodSelection) -> None:
        followed = FollowedObjects(partial(_pods, selection), partial(engines_of, ports=selection.ports))
        self._followed.append(followed)
        try:
            async with aclosing(followed.changes()) as changes:
                async for pods in changes:
                    self._found = [engine for each in pods.values() for engine in each]
                    self._changed.set()
        finally:
            self._followed.remove(followed)

    async def _follow_pool(self, wanted: PoolName) -> None:
        """Follows the pods of a pool. While it is missing or unusable, its last pods count."""
        followed: FollowedObjects[JsonObject] = FollowedObjects(partial(_pools, wanted), lambda pool: pool)
        self._followed.append(followed)
        last: PodSelection | None = None
        following: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks, aclosing(followed.changes()) as changes:
            async for pools in changes:
                try:
                    if wanted.name not in pools:
                        raise ValueError("there is no such pool")
                    selection = selection_of_pool(pools[wanted.name])
                except ValueError as error:
                    consequence = "the engines stay as they are"
                    log.error("inference_pool.unusable", pool=wanted.name, cause=str(error), consequence=consequence)
                    continue
                if selection == last:
                    continue
                last = selection
                log.info("inference_pool.followed", pool=wanted.name, labels=selection.labels, ports=selection.ports)
                if following is not None:
                    following.cancel()
                following = tasks.create_task(self._follow_pods(selection), name="pods of the pool")


def _pods(selection: PodSelection, client: ApiClient, namespace: str) -> Listing:
    listing = CoreV1Api(client).list_namespaced_pod
    return partial(listing, selection.namespace or namespace, label_selector=selection.labels)


def _pools(pool: PoolName, client: ApiClient, namespace: str) -> Listing:
    listing = CustomObjectsApi(client).list_namespaced_custom_object
    where = (POOL_GROUP, POOL_VERSION, pool.namespace or namespace, POOL_PLURAL)
    return partial(listing, *where, field_selector=f"metadata.name={pool.name}")
