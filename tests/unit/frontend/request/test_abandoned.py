"""Prefills that nobody will fetch are aborted once their worker can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.request import prefill_attempt as module
from kvrouter.frontend.request.prefill_attempt import AbandonedPrefills
from kvrouter.frontend.workers.client import Workers
from kvrouter.runtime.telemetry.metrics import new_registry

WORKER = "127.0.0.1:1"


class Unreachable:
    """Workers that cannot be reached for the first ``failures`` aborts, or ever if there are fewer aborts."""

    def __init__(self, failures: int) -> None:
        self.health = self
        self.registered = {WORKER}
        self.aborts = 0
        self.reached = asyncio.Event()
        self.tried = asyncio.Event()
        self._failures = failures

    def endpoints(self) -> set[str]:
        return self.registered

    async def abort(self, endpoint: str, request_id: str) -> bool:
        assert (endpoint, request_id) == (WORKER, "r")
        self.aborts += 1
        self.tried.set()
        if self.aborts <= self._failures:
            return False
        self.reached.set()
        return True


@asynccontextmanager
async def running() -> AsyncIterator[AbandonedPrefills]:
    abandoned = AbandonedPrefills(FrontendMetrics(new_registry()))
    task = asyncio.create_task(abandoned.run())
    try:
        yield abandoned
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_none_is_under_way(abandoned: AbandonedPrefills) -> None:
    async with asyncio.timeout(10):
        while abandoned._aborting:
            await asyncio.sleep(0.01)


async def test_a_worker_that_cannot_be_reached_is_tried_again() -> None:
    async with running() as abandoned:
        workers: Any = Unreachable(2)
        abandoned.abort(cast(Workers, workers), WORKER, "r")
        await asyncio.wait_for(workers.reached.wait(), 10)
        await until_none_is_under_way(abandoned)
    assert workers.aborts == 3


async def test_a_worker_that_leaves_is_not_tried_any_more() -> None:
    async with running() as abandoned:
        workers: Any = Unreachable(1000)
        abandoned.abort(cast(Workers, workers), WORKER, "r")
        await asyncio.wait_for(workers.tried.wait(), 10)
        workers.registered.clear()
        await until_none_is_under_way(abandoned)
    assert not workers.reached.is_set()


async def test_a_request_that_runs_on_the_worker_again_is_not_aborted() -> None:
    async with running() as abandoned:
        workers: Any = Unreachable(1000)
        abandoned.abort(cast(Workers, workers), WORKER, "r")
        await asyncio.wait_for(workers.tried.wait(), 10)
        abandoned.forget(WORKER, "r")
        await until_none_is_under_way(abandoned)
    assert not workers.reached.is_set()


class Deaf(Unreachable):
    """Workers that cannot be reached, whatever the request."""

    async def abort(self, endpoint: str, request_id: str) -> bool:
        return False


async def test_no_more_aborts_are_begun_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ABORTS", 2)
    async with running() as abandoned:
        workers: Any = Deaf(1000)
        for number in range(5):
            abandoned.abort(cast(Workers, workers), WORKER, str(number))
            await asyncio.sleep(0)
        assert abandoned.pending == 2
        workers.registered.clear()
        async with asyncio.timeout(10):
            while abandoned.pending:
                await asyncio.sleep(0.01)
