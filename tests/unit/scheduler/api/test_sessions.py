"""Sessions own the bookings of their clients: as an object, over RPCs, on call streams."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from kvrouter.scheduler.api.sessions import Sessions
from kvrouter.scheduler.bookings.ownership import SILENT_TICKS
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.errors import BadRequest, SessionLost
from kvrouter.v1.scheduler_pb2 import OpenSessionRequest

from ....waiting import until
from ..harness import Parts, ResidentBlocks, view, worker
from .session_client import (
    Client,
    connected,
    expire,
    free,
    is_open,
    opened,
    output,
    prefilled,
    reassert,
    silence,
)


async def test_the_life_of_a_booking(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        assert (await client.select("a")).rank.worker_id == 1
        response = await client.update(prefilled("a"), output("a", 1))
        assert (response.acknowledged, len(response.refused)) == (2, 0)
        assert parts.load(1) == (5, 0, 1)
        assert (await client.update(free("a"))).acknowledged == 3
        assert parts.idle()


async def test_bookings_outlive_a_closed_session_by_the_grace(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        await client.select("a")
        assert await client.close()
        assert not await client.close()
        expire(parts, 9.9)
        assert parts.load(1)[2] == 1
        await client.open()
        expire(parts, 100)
        assert parts.load(1)[2] == 1
        assert await client.close()
        expire(parts, 10)
    assert parts.idle()
    assert parts.booking_ownership.sessions == 0
    assert parts.figure("kvrouter_scheduler_session_bookings_dropped_total") == 1


async def test_a_session_ends_with_the_call_stream_on_which_it_was_opened() -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, "call stream") as client:
        await client.select("a")
    await until(lambda: not is_open(parts, "s"))
    expire(parts, 9.9)
    assert parts.load(1)[2] == 1
    expire(parts, 0.1)
    assert parts.idle()
    assert parts.booking_ownership.sessions == 0


async def test_the_loss_of_a_connection_does_not_end_a_session_that_was_opened_again_elsewhere() -> None:
    parts = Parts(view(worker(1)))
    async with connected(parts, "call stream") as new:
        async with opened(parts, "call stream") as old:
            await old.select("a")
            await new.open(opening_number=2)
        assert (await new.update(free("a"))).acknowledged == 1
    assert parts.idle()


async def test_a_connection_that_carries_many_sessions_ends_them_all() -> None:
    parts = Parts(view(worker(1)))
    async with connected(parts, "call stream") as client:
        for number in range(5):
            await Client(client.scheduler, f"s{number}").open()
        assert parts.booking_ownership.sessions == 5
    async with asyncio.timeout(30):
        while parts.booking_ownership.sessions:
            await asyncio.sleep(0.005)


async def test_a_session_that_no_call_names_is_closed(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        silence(parts, SILENT_TICKS)
        await client.update()
        silence(parts, SILENT_TICKS)
        await client.select("a")
        silence(parts, SILENT_TICKS)
        assert (await client.update()).acknowledged == 0
        silence(parts, SILENT_TICKS + 1)
        with pytest.raises(SessionLost):
            await client.update()
        with pytest.raises(SessionLost):
            await client.select("b")
        expire(parts, 10)
        assert parts.idle()


async def test_a_client_that_was_silent_comes_back(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        await client.select("a")
        silence(parts, SILENT_TICKS + 1)
        expire(parts, 10)
        assert parts.idle()
        await client.open("a")
        assert not (await client.update(reassert("a"))).refused
        assert parts.load(1)[2] == 1


async def test_a_cancelled_selection_books_nothing(transport: str) -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        selecting = asyncio.create_task(client.select("a"))
        await indexer.queried()
        selecting.cancel()
        await asyncio.wait([selecting])
        # What was cancelled on the way is over once a later call is answered.
        await client.update(free("a"))
        indexer.may_answer.set()
        assert (await client.select("b")).rank.worker_id == 1
        assert [booking.key[0] for booking in parts.booking_table] == ["b"]


@pytest.mark.parametrize(
    "fields",
    [{"session_id": ""}, {"session_id": "x" * 257}, {"first_update": 1 << 63}, {"first_update": 0}],
    ids=["empty", "long", "number", "zero"],
)
async def test_an_invalid_opening_is_refused_and_opens_nothing(fields: dict[str, Any], transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with connected(parts, transport) as client:
        with pytest.raises(BadRequest):
            await client.open(**fields)
        with pytest.raises(BadRequest):
            await client.open("")
    assert parts.booking_ownership.sessions == 0


async def test_the_longest_names_of_clients_and_components_make_a_session() -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, session_id="f" * 64 + "." + "c" * 64 + ".31") as client:
        assert (await client.select("a")).rank.worker_id == 1


async def test_calls_of_a_former_opening_are_refused(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as old:
        await old.select("a")
        new = Client(old.scheduler, "s")
        await new.open(opening_number=2)
        with pytest.raises(SessionLost):
            await old.select("b")
        with pytest.raises(SessionLost):
            await old.update(free("a"))
        assert not await old.close()
        expire(parts, 1000)
        assert parts.load(1)[2] == 1
        assert (await new.update(free("a"))).acknowledged == 1
    assert parts.idle()


async def test_late_selections_of_a_former_opening_are_not_booked(transport: str) -> None:
    indexer = ResidentBlocks.held()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        late = asyncio.create_task(client.select("a"))
        await indexer.queried()
        await client.open(lists=True)
        indexer.may_answer.set()
        with pytest.raises(SessionLost):
            await late
        assert parts.idle()


async def test_a_thousand_sessions_that_come_and_go_leave_nothing() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions(mode="round-robin"), grace=10)
    connection = Connected()
    for number in range(1000):
        client = Client(parts.service(), f"s{number}")
        await client.open()
        if number % 2:
            parts.sessions.open(OpenSessionRequest(session_id=f"s{number}", opening_number=2), connection)
            client.opening_number = 2
        await client.select(f"r{number}")
        if number % 4 != 1:
            await client.close()
    connection.lose()
    expire(parts, 10)
    assert parts.idle()
    assert parts.booking_ownership.sessions == 0
    assert not list(kept(parts.sessions))


class Connected:
    """A connection that is lost by hand."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []

    def on_lost(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def lose(self) -> None:
        for callback in self.callbacks:
            callback()


def kept(sessions: Sessions) -> Iterator[object]:
    yield from sessions._connections
    yield from sessions._opened_on


async def test_a_session_that_returns_frees_bookings_that_ended_elsewhere(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        for name in ["kept", "ended", "asked again"]:
            await client.select(name)
        await client.open("kept", "asked again")
        assert {booking.key[0] for booking in parts.booking_table} == {"kept", "asked again"}
        assert (await client.select("asked again")).repeated


async def test_an_opening_that_comes_late_is_refused_and_changes_nothing(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with connected(parts, transport) as client:
        await client.open(opening_number=2)
        await client.select("a")
        late = Client(client.scheduler, "s")
        with pytest.raises(SessionLost):
            await late.open(lists=True, opening_number=1)
        assert (await client.update(free("a"))).acknowledged == 1
    assert parts.figure("kvrouter_scheduler_unknown_frees_total") == 0
