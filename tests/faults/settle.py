"""How every scenario of a fleet ends: all load tables are empty, and each Indexer equals the engines' block tables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import cast

import aiohttp
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.indexer_pb2 import DumpRequest, GetStatsRequest
from kvrouter.v1.registry_pb2 import ServiceRegistration
from prometheus_client.parser import text_string_to_metric_families

from .fleet import (
    CALL_SECONDS,
    COMPONENT,
    FRONTENDS,
    INDEXERS,
    PATIENCE_SECONDS,
    POLL_SECONDS,
    SCHEDULERS,
    WORKERS,
    Fleet,
)

_NAMED = Component(namespace=COMPONENT.namespace, name=COMPONENT.name)

Blocks = frozenset[tuple[int, int, int, int]]
"""(engine hash, local hash, sequence hash, copies) of every block."""
RankCache = tuple[tuple[int, int], Blocks]
"""Cursor (incarnation, next event id) and blocks of one rank."""
Check = Callable[[Fleet, str], Awaitable[None]]
"""Raises what is not yet as it has to be at one process of the fleet."""


class NotSettled(Exception):
    """What is not yet as it has to be in the end."""


async def settle(fleet: Fleet) -> None:
    """Returns when all load tables are empty and each Indexer equals the engines' own block tables."""
    checks: tuple[tuple[Check, tuple[str, ...]], ...] = (
        (_scheduler_is_idle, SCHEDULERS),
        (_frontend_is_idle, FRONTENDS),
        (_index_equals_engines, INDEXERS),
    )
    for check, names in checks:
        for name in names:
            await _until(check, fleet, name)


async def _until(check: Check, fleet: Fleet, name: str) -> None:
    last: Exception | None = None
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                try:
                    return await check(fleet, name)
                except (NotSettled, KvRouterError, OSError, aiohttp.ClientError) as error:
                    last = error
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise AssertionError(f"{name}: {last}") from None


async def _scheduler_is_idle(fleet: Fleet, name: str) -> None:
    status = await fleet.scheduler_status(name)
    booked = {
        rank.rank.worker_id: (rank.active_requests, rank.active_blocks, rank.prefill_tokens)
        for component in status.components
        for rank in component.ranks
    }
    queued = sum(component.queued.requests for component in status.components)
    if status.bookings or queued or any(map(any, booked.values())):
        raise NotSettled(f"{status.bookings} bookings, {queued} queued requests, load by worker {booked}")


async def _frontend_is_idle(fleet: Fleet, name: str) -> None:
    registration = cast(ServiceRegistration, fleet.registration(name))
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_SECONDS)) as session,
        session.get(f"http://{registration.http_endpoint}/metrics") as response,
    ):
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    found = {
        gauge: sum(sample.value for sample in families[f"kvrouter_frontend_{gauge}"].samples)
        for gauge in ("live_bookings", "requests_in_flight")
    }
    if any(found.values()):
        raise NotSettled(f"the Frontend has {found}")


async def _index_equals_engines(fleet: Fleet, name: str) -> None:
    engines = {worker_id: await _engine_cache(fleet, worker) for worker, worker_id in WORKERS.items()}
    index = await _indexed(fleet, name)
    for worker_id in engines.keys() | index.keys():
        if engines.get(worker_id) != index.get(worker_id):
            raise NotSettled(_difference(worker_id, engines.get(worker_id), index.get(worker_id)))


async def _engine_cache(fleet: Fleet, name: str) -> RankCache:
    async with asyncio.timeout(CALL_SECONDS):
        reader, writer = await asyncio.open_unix_connection(fleet.block_table_socket(name))
        table = json.loads(await reader.read())
        writer.close()
    if table["requests"]:
        raise NotSettled(f"the engine of {name} has {table['requests']} requests")
    return tuple(table["cursor"]), frozenset(map(tuple, table["blocks"]))


async def _indexed(fleet: Fleet, name: str) -> dict[int, RankCache]:
    """What an Indexer knows of each worker's rank."""
    indexer = fleet.indexer(name)
    stats = await indexer.get_stats(GetStatsRequest(component=_NAMED), deadline=Deadline.after(CALL_SECONDS))
    if not stats.components or not stats.components[0].ready:
        raise NotSettled("the Indexer is not ready")
    if partial := [rank.rank.worker_id for rank in stats.components[0].ranks if rank.partial]:
        raise NotSettled(f"partial: workers {partial}")
    cursors: dict[int, tuple[int, int]] = {}
    blocks: dict[int, set[tuple[int, int, int, int]]] = {}
    dump = indexer.dump(DumpRequest(component=_NAMED), deadline=Deadline.after(CALL_SECONDS))
    async with aclosing(dump) as parts:
        async for part in parts:
            worker_id = part.state.rank.worker_id
            cursors[worker_id] = part.state.cursor.incarnation, part.state.cursor.next_event_id
            blocks.setdefault(worker_id, set()).update(
                (block.engine_hash, block.local_hash, block.sequence_hash, block.copies[0].copies)
                for block in part.state.blocks
            )
    return {worker_id: (cursor, frozenset(blocks[worker_id])) for worker_id, cursor in cursors.items()}


def _difference(worker_id: int, engine: RankCache | None, index: RankCache | None) -> str:
    if engine is None or index is None:
        return f"worker {worker_id}: {'unknown to the index' if index is None else 'in the index, but not there'}"
    return (
        f"worker {worker_id}: cursor {engine[0]} of the engine, {index[0]} in the index;"
        f" {len(engine[1] - index[1])} blocks missing, {len(index[1] - engine[1])} surplus"
    )
