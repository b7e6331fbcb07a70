"""Messages of a worker over NATS during its check."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import nats
from google.protobuf.message import DecodeError
from kvrouter.devtools.conformance.cache import CacheProbe
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import WorkerUnderTest
from kvrouter.net.nats.client import TolerantClient
from kvrouter.v1.events_pb2 import KvEventBatch, LoadReport
from nats.aio.msg import Msg
from nats.errors import Error as NatsError, NoServersError

_REPORTS = 2


class PublishedMessages:
    """Collects the events and load reports of a component's workers."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, KvEventBatch]] = []
        """Batches with their subjects, in the order of arrival."""
        self.reports: list[LoadReport] = []
        self.undecodable = 0
        """Undecodable messages."""

    async def add(self, message: Msg) -> None:
        """Collects a message."""
        try:
            if ".load." in message.subject:
                self.reports.append(LoadReport.FromString(message.data))
            else:
                self.batches.append((message.subject, KvEventBatch.FromString(message.data)))
        except DecodeError:
            self.undecodable += 1


@asynccontextmanager
async def collecting(options: CheckOptions) -> AsyncIterator[PublishedMessages | str]:
    """Collects while the context lasts; yields why not if it cannot."""
    if not options.nats or options.component is None:
        yield "needs --nats and --component"
        return
    client, messages = TolerantClient(), PublishedMessages()
    try:
        await client.connect(options.nats, allow_reconnect=False, connect_timeout=5)
    except (NatsError, NoServersError, OSError) as error:
        yield f"NATS at {options.nats} does not answer: {error}"
        return
    try:
        component = options.component
        for subject in (component.events_wildcard, component.live_wildcard, component.load_wildcard):
            await client.subscribe(subject, cb=messages.add)
        await client.flush()
        yield messages
    finally:
        with contextlib.suppress(nats.errors.Error):
            await client.close()


async def check_published_events(worker: WorkerUnderTest, probe: CacheProbe, messages: PublishedMessages | str) -> str:
    """Checks the publication of every event since the first request over NATS."""
    collected = _collected(messages)
    if probe.before is None:
        raise CheckSkipped("the first request was not served")
    first, rank = probe.before.cursor, worker.options.dp_rank
    last = (await worker.snapshot()).cursor.next_event_id

    def ids() -> set[int]:
        return {
            event.event_id
            for _, batch in collected.batches
            if (batch.worker_id, batch.dp_rank, batch.incarnation) == (worker.worker_id, rank, first.incarnation)
            for event in batch.events
        }

    async def complete() -> bool | None:
        return True if ids().issuperset(range(first.next_event_id, last)) else None

    if not await worker.until(complete):
        missing = sorted(set(range(first.next_event_id, last)) - ids())
        raise CheckFailed(
            expected=f"events {first.next_event_id} to {last - 1} over NATS",
            received=f"{last - first.next_event_id - len(missing)} of {last - first.next_event_id}; the first missing "
            f"one is {missing[0]}; {collected.undecodable} messages could not be decoded",
            advice="publish each batch on the rank's subject (ComponentName.events_subject, or live_subject with Core "
            "NATS). Check --nats and --component, and the worker's log.",
        )
    sizes = {batch.block_size for _, batch in collected.batches if batch.worker_id == worker.worker_id and batch.events}
    if sizes - {worker.block_size}:
        raise CheckFailed(
            expected=f"block_size {worker.block_size} in each batch",
            received=", ".join(map(str, sorted(sizes))),
            advice="Indexers refuse batches of another block size: publish the component's.",
        )
    return f"{last - first.next_event_id} events"


async def check_published_loads(worker: WorkerUnderTest, messages: PublishedMessages | str) -> str:
    """Checks the order of published load reports."""
    collected = _collected(messages)
    rank = worker.options.dp_rank

    def reports() -> list[LoadReport]:
        matches = [(each.rank.worker_id, each.rank.dp_rank) == (worker.worker_id, rank) for each in collected.reports]
        return [each for each, is_ours in zip(collected.reports, matches, strict=True) if is_ours]

    async def enough() -> bool | None:
        return True if len(reports()) >= _REPORTS else None

    if not await worker.until(enough):
        raise CheckFailed(
            expected=f"{_REPORTS} load reports of rank {rank} over NATS in {worker.options.seconds:g} s",
            received=str(len(reports())),
            advice="publish a LoadReport about every second: without it busy workers are not noticed.",
        )
    numbers = [each.sequence for each in reports() if each.sequence]
    if numbers != sorted(set(numbers)):
        raise CheckFailed(
            expected="a sequence that rises with each report",
            received=", ".join(map(str, numbers[-8:])),
            advice="number the reports of an incarnation from 1, or leave the number out.",
        )
    return f"{len(reports())} reports"


def _collected(messages: PublishedMessages | str) -> PublishedMessages:
    if isinstance(messages, str):
        raise CheckSkipped(messages)
    return messages
