"""Replays a trace one request at a time, each after the cache events of the previous one were applied.

As nothing is in flight when the router decides, the predicted overlap must equal what the worker finds in its cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import cast

from kvrouter.devtools.replay.frontend_target import ReplayOptions, generate_request
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.runtime.contracts import Frontend, Indexer, Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.common_pb2 import Component, Cursor
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.frontend_pb2 import FrontendServiceSelectWorkerRequest
from kvrouter.v1.indexer_pb2 import FindMatchesRequest
from kvrouter.v1.worker_pb2 import GetRankStateRequest

_APPLY_SECONDS = 30.0
_CALL_SECONDS = 10.0
_POLL_SECONDS = 0.005


class NotApplied(Exception):
    """An Indexer did not apply in time what a worker published."""


class SequentialReplay:
    """Replays requests one by one. Created by ``sequential_replay``, which closes its channels."""

    def __init__(self, frontend: Frontend, indexer: Indexer, component: Component, channels: AsyncExitStack) -> None:
        self._frontend = frontend
        self._indexer = indexer
        self._component = component
        self._channels = channels
        self._workers: dict[int, Worker] = {}

    async def play(self, requests: Sequence[TraceRequest], options: ReplayOptions) -> list[RequestRecord]:
        """Replays the requests and returns their records in order.

        Raises:
            KvRouterError: a request failed.
            NotApplied: the Indexer did not apply a worker's events in time.
        """
        records = []
        for request in requests:
            record = RequestRecord(request.index, 0.0, request.input_length)
            deadline = Deadline.after(options.request_timeout_seconds)
            call = self._frontend.generate(generate_request(request, options), deadline=deadline)
            async with aclosing(call) as pieces:
                async for piece in pieces:
                    record.take(piece)
            record.ended_engine_s = 0.0
            records.append(record)
            if record.worker is not None:
                await self._until_applied(record.worker, options.model)
        return records

    async def _until_applied(self, rank: tuple[int, int], model: str) -> None:
        worker = await self._worker(rank[0], model)
        published = await _cursor(worker, rank[1])
        try:
            async with asyncio.timeout(_APPLY_SECONDS):
                while not _covers(await self._applied(rank), published):  # noqa: ASYNC110 - asks another process
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise NotApplied(
                f"the Indexer has not applied event {published.next_event_id - 1} of worker {rank[0]}, rank {rank[1]}, "
                f"in {_APPLY_SECONDS:.0f} s"
            ) from None

    async def _applied(self, rank: tuple[int, int]) -> Cursor | None:
        request = FindMatchesRequest(component=self._component)
        request.local_hashes.hashes.append(0)  # any hash: only the cursors are used
        try:
            found = await self._indexer.find_matches(request, deadline=Deadline.after(_CALL_SECONDS))
        except KvRouterError:
            return None
        for place, known in enumerate(zip(found.worker_ids, found.dp_ranks, strict=True)):
            if known == rank:
                return Cursor(incarnation=found.incarnations[place], next_event_id=found.next_event_ids[place])
        return None

    async def _worker(self, worker_id: int, model: str) -> Worker:
        if worker_id not in self._workers:
            request = FrontendServiceSelectWorkerRequest()
            request.request.model = model
            request.request.token_ids.ids.append(0)
            request.request.constraints.worker_id = worker_id
            found = await self._frontend.select_worker(request, deadline=Deadline.after(_CALL_SECONDS))
            channel = await self._channels.enter_async_context(open_channel(found.selection.endpoint))
            service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
            self._workers[worker_id] = cast("Worker", remote(service, channel))
        return self._workers[worker_id]


@asynccontextmanager
async def sequential_replay(
    frontend: Frontend, indexer: Indexer, component: Component
) -> AsyncIterator[SequentialReplay]:
    """Yields a sequential replay of one component's workers through a Frontend and an Indexer."""
    async with AsyncExitStack() as channels:
        yield SequentialReplay(frontend, indexer, component, channels)


async def _cursor(worker: Worker, dp_rank: int) -> Cursor:
    """Returns the cursor of a rank's state, from the first chunk."""
    states = worker.get_rank_state(GetRankStateRequest(dp_rank=dp_rank), deadline=Deadline.after(_CALL_SECONDS))
    async with aclosing(states) as chunks:
        async for chunk in chunks:
            return chunk.cursor
    raise NotApplied("a worker returned no state: check that it implements GetRankState")


def _covers(applied: Cursor | None, published: Cursor) -> bool:
    return (
        applied is not None
        and applied.incarnation == published.incarnation
        and applied.next_event_id >= published.next_event_id
    )
