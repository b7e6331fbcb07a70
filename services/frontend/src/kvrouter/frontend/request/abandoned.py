"""Aborts prefills whose blocks no decode worker will fetch, since they occupy their worker's memory until then."""

from __future__ import annotations

import asyncio
from functools import partial

import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.client import Workers
from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_random_exponential

log = structlog.get_logger(component="frontend")

_PATIENCE_SECONDS = 600.0
"""Time for which a worker that cannot be reached is tried; longer than engines keep the blocks of a prefill."""
_MAX_PAUSE_SECONDS = 10.0
MAX_ABORTS = 16_384
"""Aborts that are under way at once. Beyond it a worker keeps the blocks until its own time limit."""


class AbandonedPrefills:
    """Aborts in the background, so the end of a request need not wait. ``run`` must be running.

    A worker that cannot be reached, such as one behind a connection that fell silent, is tried again until it leaves.
    """

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._queue: asyncio.Queue[tuple[Workers, str, str]] = asyncio.Queue(MAX_ABORTS)
        self._aborting: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Aborts under way, by address of the worker and id of the request."""

    @property
    def pending(self) -> int:
        """Number of aborts under way, at most ``MAX_ABORTS``."""
        return self._queue.qsize() + len(self._aborting)

    def abort(self, workers: Workers, endpoint: str, request_id: str) -> None:
        """Aborts a request at its prefill worker soon."""
        self._metrics.abandoned_prefills.inc()
        if self.pending >= MAX_ABORTS:
            return
        self._queue.put_nowait((workers, endpoint, request_id))

    def forget(self, endpoint: str, request_id: str) -> None:
        """Stops aborting a request that is about to run on the worker again, which replaces its earlier prefill."""
        if (aborting := self._aborting.get((endpoint, request_id))) is not None:
            aborting.cancel()

    async def run(self) -> None:
        """Aborts until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                workers, endpoint, request_id = await self._queue.get()
                log.info("prefill.aborted", request_id=request_id, endpoint=endpoint)
                self.forget(endpoint, request_id)
                aborting = group.create_task(_abort(workers, endpoint, request_id))
                self._aborting[endpoint, request_id] = aborting
                aborting.add_done_callback(partial(self._ended, (endpoint, request_id)))

    def _ended(self, key: tuple[str, str], aborting: asyncio.Task[None]) -> None:
        if self._aborting.get(key) is aborting:
            del self._aborting[key]


async def _abort(workers: Workers, endpoint: str, request_id: str) -> None:
    """Aborts a request once its worker can be reached; gives up if the worker leaves."""

    async def is_over() -> bool:
        return endpoint not in workers.health.endpoints() or await workers.abort(endpoint, request_id)

    await AsyncRetrying(
        wait=wait_random_exponential(multiplier=0.1, max=_MAX_PAUSE_SECONDS),
        stop=stop_after_delay(_PATIENCE_SECONDS),
        retry=retry_if_result(lambda over: not over),
        retry_error_callback=lambda _: False,
    )(is_over)
