"""Aborts prefills whose blocks no decode worker will fetch, since they occupy their worker's memory until then."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.worker_client.client import Workers

log = structlog.get_logger(component="frontend")


class _Abandoned(NamedTuple):
    workers: Workers
    endpoint: str
    request_id: str


class AbandonedPrefills:
    """Aborts in the background, so that a request that ends need not wait. ``run`` must be running."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._queue: asyncio.Queue[_Abandoned] = asyncio.Queue()

    def abort(self, workers: Workers, endpoint: str, request_id: str) -> None:
        """Aborts a request at its prefill worker soon, as far as the worker can be reached."""
        self._metrics.abandoned_prefills.inc()
        self._queue.put_nowait(_Abandoned(workers, endpoint, request_id))

    async def run(self) -> None:
        """Aborts until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                workers, endpoint, request_id = await self._queue.get()
                log.info("prefill.aborted", request_id=request_id, endpoint=endpoint)
                group.create_task(workers.abort(endpoint, request_id))
