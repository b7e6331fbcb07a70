"""Reading a pull consumer, on a real NATS: what arrives is taken at once, and no request outlives its fetch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvrouter.indexer.ingest import jetstream
from kvrouter.indexer.ingest.jetstream import REQUESTED_MESSAGES, Pull
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError

from ..indexing import PATIENCE_SECONDS

DURABLE = "reader"
LONG_SECONDS = 2 * PATIENCE_SECONDS
SHORT_SECONDS = 0.1


@asynccontextmanager
async def reading(connection: Client, component: ComponentName) -> AsyncIterator[tuple[JetStreamContext, Pull]]:
    js = connection.jetstream()
    await ensure_stream(js, component)
    await js.add_consumer(component.stream, ConsumerConfig(durable_name=DURABLE, ack_policy=AckPolicy.ALL))
    pull = Pull(connection, component.stream, DURABLE)
    await pull.open()
    try:
        yield js, pull
    finally:
        await pull.close()


async def taken(pull: Pull, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) < count:
            found += [message.data for message in await pull.take(LONG_SECONDS)]
    return found


async def test_a_message_is_taken_although_more_were_requested(connection: Client, component: ComponentName) -> None:
    async with reading(connection, component) as (js, pull):
        for number in range(3):
            await js.publish(component.events_subject(1, 0), b"%d" % number)
            assert await taken(pull, 1) == [b"%d" % number]


async def test_more_messages_than_a_request_asks_for_arrive_in_order(
    connection: Client, component: ComponentName
) -> None:
    expected = [b"%d" % number for number in range(3 * REQUESTED_MESSAGES + 5)]
    async with reading(connection, component) as (js, pull):
        for data in expected:
            await js.publish(component.events_subject(1, 0), data)
        assert await taken(pull, len(expected)) == expected


async def test_what_is_taken_at_once_counts_for_its_request(connection: Client, component: ComponentName) -> None:
    expected = [b"%d" % number for number in range(2 * REQUESTED_MESSAGES + 5)]
    found: list[bytes] = []

    def take(_subject: str, _reply: str, data: bytes) -> bool:
        is_taken = len(found) % 7 > 0
        found.extend([data] * is_taken)
        return is_taken

    async with reading(connection, component) as (js, pull):

        async def take_all() -> None:
            while len(found) < len(expected):
                found.extend([message.data for message in await pull.take(LONG_SECONDS, take)])

        taking = asyncio.create_task(take_all())
        for data in expected:
            await js.publish(component.events_subject(1, 0), data)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await taking
    assert found == expected


async def test_after_none_the_server_sends_nothing_until_the_next_fetch(
    connection: Client, component: ComponentName
) -> None:
    async with reading(connection, component) as (js, pull):
        assert await pull.take(SHORT_SECONDS) == []
        await js.publish(component.events_subject(1, 0), b"late")
        async with asyncio.timeout(PATIENCE_SECONDS):
            # The server counts a message shortly after it has stored it.
            while not (info := await js.consumer_info(component.stream, DURABLE)).num_pending:
                await asyncio.sleep(0.01)
        assert (info.num_waiting, info.delivered.consumer_seq if info.delivered else 0) == (0, 0)
        assert await taken(pull, 1) == [b"late"]


async def test_the_late_end_of_a_request_is_not_taken_for_that_of_the_next(
    connection: Client, component: ComponentName, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading(connection, component) as (js, pull):

        async def requests(count: int) -> None:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while (await js.consumer_info(component.stream, DURABLE)).num_waiting != count:
                    await asyncio.sleep(0.01)

        monkeypatch.setattr(jetstream, "_MARGIN_SECONDS", -1.0)
        assert await pull.take(SHORT_SECONDS) == []
        waiting = asyncio.create_task(pull.take(LONG_SECONDS))
        await requests(2)
        await requests(1)
        await js.publish(component.events_subject(1, 0), b"next")
        assert [message.data for message in await waiting] == [b"next"]


async def test_a_deleted_consumer_is_an_error(connection: Client, component: ComponentName) -> None:
    async with reading(connection, component) as (js, pull):
        await js.delete_consumer(component.stream, DURABLE)
        with pytest.raises(APIError):
            await pull.take(LONG_SECONDS)


async def test_messages_before_an_error_are_taken_first(connection: Client, component: ComponentName) -> None:
    async with reading(connection, component) as (js, pull):
        waiting = asyncio.create_task(pull.take(LONG_SECONDS))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (await js.consumer_info(component.stream, DURABLE)).num_waiting:
                await asyncio.sleep(0.01)
        await js.publish(component.events_subject(1, 0), b"last")
        assert [message.data for message in await waiting] == [b"last"]
        await js.delete_consumer(component.stream, DURABLE)
        with pytest.raises(APIError):
            await pull.take(LONG_SECONDS)
