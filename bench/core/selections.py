"""Measures the calls of a request at a Scheduler, in process: the selection with its booking, first token, output, end.

    python bench/core/selections.py [--ranks 16] [--requests 2000] [--blocks 250]

The Indexer is an object that answers at once, so its time does not count. The selection includes reading the request,
asking the Indexer, the decision, the booking and the response. 320 requests are in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import random
import struct
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import structlog
from kvrouter.runtime.booking_updates import Free, OutputReport, PrefillComplete, key_of
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.scheduler.api.request_reader import RequestReader
from kvrouter.scheduler.api.selection import Selector
from kvrouter.scheduler.bookings.conversations import Conversations
from kvrouter.scheduler.bookings.ownership import BookingOwnership
from kvrouter.scheduler.bookings.statistics import BookingStatistics
from kvrouter.scheduler.bookings.table import BookingTable
from kvrouter.scheduler.bookings.updates import BookingUpdates
from kvrouter.scheduler.load.booked_load import Accounting
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.metrics import SchedulerMetrics
from kvrouter.scheduler.queue.queued_requests import QueuedRequests
from kvrouter.scheduler.queue.request_queue import MAX_QUEUED_REQUESTS
from kvrouter.scheduler.request.options import RoutingOptions, Thresholds
from kvrouter.scheduler.routing.decide import Decisions
from kvrouter.scheduler.routing.router import Router
from kvrouter.v1.common_pb2 import BookingKey, LocalHashes, RoutingRequest, Stage
from kvrouter.v1.indexer_pb2 import FindMatchesResponse
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, WorkerRegistration
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest
from prometheus_client import CollectorRegistry

BLOCK_SIZE = 16
IN_FLIGHT = 320
NAME = ComponentName("bench", "pool")


class StaticIndexer:
    """Answers every query alike, at once."""

    def __init__(self, ranks: int, blocks: int, rng: random.Random) -> None:
        answer = FindMatchesResponse(
            prompt_blocks=blocks,
            worker_ids=range(ranks),
            dp_ranks=[0] * ranks,
            device_blocks=[rng.randrange(blocks) for _ in range(ranks)],
            incarnations=[1] * ranks,
            next_event_ids=[9] * ranks,
        )
        self._encoded = answer.SerializeToString()

    async def find_matches_of_hashes(self, *_: object, **__: object) -> bytes:
        return self._encoded


def scheduler(mode: str, ranks: int, indexer: StaticIndexer, rng: random.Random) -> tuple[Selector, BookingUpdates]:
    """Returns a Scheduler's parts, put together as the service does."""
    workers = {
        number: WorkerRegistration(
            worker_id=number,
            max_batched_tokens=8192,
            ranks=[RankRegistration(dp_rank=0, incarnation=1, total_blocks=100_000)],
        )
        for number in range(ranks)
    }
    view = ComponentView(NAME, ComponentDescriptor(model="m", block_size=BLOCK_SIZE), workers)
    directory = cast(Any, SimpleNamespace(components={NAME: view}))
    metrics = SchedulerMetrics(CollectorRegistry())
    pools = Pools(directory, Accounting(), report_age_seconds=10)
    table = BookingTable()
    ownership = BookingOwnership(table, session_grace_seconds=10)
    conversations = Conversations(1000, metrics, time.monotonic)
    router = Router(
        pools,
        ownership,
        Decisions(1000),
        lambda _: indexer,
        metrics,
        indexer_timeout_seconds=1.0,
        rng=rng,
        clock=time.monotonic,
        conversations=conversations,
    )
    queued = QueuedRequests(router, metrics, max_queued_requests=MAX_QUEUED_REQUESTS, clock=time.monotonic)
    reader = RequestReader(pools, ThresholdBoard(Thresholds()), RoutingOptions(mode))
    selector = Selector(reader, router, queued, metrics)
    BookingStatistics(metrics).follow(table)
    conversations.follow(table)
    queued.follow(table)
    return selector, BookingUpdates(table, ownership, pools, metrics, time.monotonic)


def request(blocks: int, stems: list[bytes], rng: random.Random) -> RoutingRequest:
    """Returns a request whose first blocks are those of others, as in a conversation."""
    stem = rng.choice(stems)
    hashes = struct.unpack(f"<{blocks}Q", stem + rng.randbytes(8 * blocks - len(stem)))
    tokens = blocks * BLOCK_SIZE + 1
    return RoutingRequest(
        model="m", local_hashes=LocalHashes(hashes=hashes), prompt_tokens=tokens, block_size=BLOCK_SIZE
    )


async def measure(mode: str, ranks: int, requests: int, blocks: int) -> dict[str, list[int]]:
    """Returns nanoseconds by call, sorted."""
    rng = random.Random(1)
    selector, bookings = scheduler(mode, ranks, StaticIndexer(ranks, blocks, rng), rng)
    stems = [rng.randbytes(8 * (2 * blocks // 5)) for _ in range(8)]
    keys = [BookingKey(request_id=f"{number:032x}", stage=Stage.STAGE_WHOLE) for number in range(requests + IN_FLIGHT)]
    prompts = [request(blocks, stems, rng) for _ in keys]
    spent = defaultdict(list)
    deadline = Deadline.after(600)
    clock = time.perf_counter_ns
    gc.collect()
    gc.disable()
    for number, key in enumerate(keys):
        selection = SelectWorkerRequest(request=prompts[number], booking=key)
        began = clock()
        await selector.select(selection, deadline=deadline)
        spent["select and book"].append(clock() - began)
        prefilled = PrefillComplete(key_of(key))
        began = clock()
        bookings.mark_prefill_complete(prefilled)
        spent["first token"].append(clock() - began)
        if number < IN_FLIGHT:
            continue
        output = OutputReport(key_of(keys[number - IN_FLIGHT // 2]), 17)
        began = clock()
        bookings.report_output(output)
        spent["output"].append(clock() - began)
        free = Free(key_of(keys[number - IN_FLIGHT]), BLOCK_SIZE)
        began = clock()
        bookings.free(free)
        spent["free"].append(clock() - began)
    gc.enable()
    return {name: sorted(each) for name, each in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=250)
    options = parser.parse_args()
    # At level debug each decision is logged with all its formulas.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(f"{options.ranks} ranks, {options.blocks} blocks each; microseconds{'p10':>12}{'p50':>10}{'p99':>10}")
    for mode in ("kv", "forecast"):
        spent = asyncio.run(measure(mode, options.ranks, options.requests, options.blocks))
        for name, each in spent.items():
            p10, p50, p99 = (each[len(each) * percent // 100] / 1e3 for percent in (10, 50, 99))
            print(f"{mode + ', ' + name:46}{p10:8.1f}{p50:10.1f}{p99:10.1f}", flush=True)


if __name__ == "__main__":
    main()
