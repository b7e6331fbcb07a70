"""Sessions own the bookings of their clients, and apply numbered updates: as an object, over RPCs, on call streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import Any

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.scheduler.api.sessions import Sessions
from kvrouter.scheduler.bookings.leases import SILENT_TICKS
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.common_pb2 import Component, Rank
from kvrouter.v1.error_encoding import from_parts
from kvrouter.v1.errors import BadRequest, NotFound, SessionLost, UnknownModel
from kvrouter.v1.scheduler_pb2 import (
    BookingUpdate,
    CloseSessionRequest,
    FreeRequest,
    LiveBookings,
    MarkPrefillCompleteRequest,
    OpenSessionRequest,
    OpenSessionResponse,
    ReassertBooking,
    ReportOutputRequest,
    SelectWorkerRequest,
    SelectWorkerResponse,
    UpdateBookingsRequest,
    UpdateBookingsResponse,
)

from ...runtime.rpc.rpc_harness import SCHEDULER, called
from ..harness import POOL, Parts, ResidentBlocks, key, prompt, routing, selecting, view, worker

TRANSPORTS = ("object", "rpc", "call stream")


class Client:
    """A client of one session."""

    def __init__(self, scheduler: Any, session_id: str) -> None:
        self.scheduler = scheduler
        self.session_id = session_id
        self.opening_number = 0
        self.updates = 0

    async def call(self, method: str, request: object) -> Any:
        response = getattr(self.scheduler, method)(request, deadline=Deadline.after(10))
        return await response if isawaitable(response) else response

    async def open(self, *live: str, lists: bool = False, **fields: Any) -> OpenSessionResponse:
        """Opens the session again, by default with the next number; ``live`` bookings are listed if there are any."""
        known: dict[str, Any] = {"session_id": self.session_id, "client_name": "c"}
        if live or lists:
            known["live"] = LiveBookings(bookings=[key(each) for each in live])
        self.opening_number = fields.setdefault("opening_number", self.opening_number + 1)
        response: OpenSessionResponse = await self.call("open_session", OpenSessionRequest(**known | fields))
        return response

    async def close(self, opening_number: int | None = None) -> bool:
        number = self.opening_number if opening_number is None else opening_number
        request = CloseSessionRequest(session_id=self.session_id, opening_number=number)
        return bool((await self.call("close_session", request)).was_open)

    async def update(self, *updates: BookingUpdate, number: int | None = None) -> UpdateBookingsResponse:
        """Sends updates with the next numbers, or from ``number`` on."""
        first = self.updates + 1 if number is None else number
        if number is None:
            self.updates += len(updates)
        request = UpdateBookingsRequest(
            session_id=self.session_id, opening_number=self.opening_number, first_number=first, updates=updates
        )
        response: UpdateBookingsResponse = await self.call("update_bookings", request)
        return response

    def selection(self, name: str, **fields: Any) -> SelectWorkerRequest:
        return selecting(name, session_id=self.session_id, opening_number=self.opening_number, **fields)

    async def select(self, name: str, **fields: Any) -> SelectWorkerResponse:
        response: SelectWorkerResponse = await self.call("select_worker", self.selection(name, **fields))
        return response


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def connected(parts: Parts, transport: str = "object", session_id: str = "s") -> AsyncIterator[Client]:
    """A client without an open session."""
    if transport == "object":
        yield Client(parts.service(), session_id)
        return
    async with called(SCHEDULER, parts.service(), transport) as (_, stub):
        yield Client(stub, session_id)


@asynccontextmanager
async def opened(parts: Parts, transport: str = "object", session_id: str = "s") -> AsyncIterator[Client]:
    """A client with an open session."""
    async with connected(parts, transport, session_id) as client:
        response = await client.open()
        assert (response.grace_ms, response.scheduler_id, response.acknowledged) == (10_000, "s", 0)
        yield client


def prefilled(name: str) -> BookingUpdate:
    return BookingUpdate(prefill_complete=MarkPrefillCompleteRequest(booking=key(name)))


def output(name: str, tokens: int) -> BookingUpdate:
    return BookingUpdate(output=ReportOutputRequest(booking=key(name), output_tokens=tokens))


def free(name: str) -> BookingUpdate:
    return BookingUpdate(free=FreeRequest(booking=key(name)))


def reassert(request_id: str, *, worker_id: int = 1, blocks: int = 4, **fields: object) -> BookingUpdate:
    hashes = memoryview(prompt(blocks).sequence_hashes).cast("Q").tolist()
    known = {
        "booking": key(request_id),
        "rank": Rank(worker_id=worker_id),
        "component": Component(namespace=POOL.namespace, name=POOL.name),
        "sequence_hashes": hashes,
        "prompt_tokens": 64,
        "prefill_tokens": 32,
    }
    return BookingUpdate(reassert=ReassertBooking(**(known | fields)))  # type: ignore[arg-type]


def expire(parts: Parts, seconds: float) -> None:
    parts.now += seconds
    parts.bookings.expire()


def silence(parts: Parts, ticks: int) -> None:
    for _ in range(ticks):
        parts.sessions.close_silent()


def is_open(parts: Parts, session_id: str) -> bool:
    try:
        parts.booking_leases.check_open(session_id)
    except SessionLost:
        return False
    return True


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


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
    assert parts.booking_leases.sessions == 0
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
    assert parts.booking_leases.sessions == 0


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
        assert parts.booking_leases.sessions == 5
    async with asyncio.timeout(30):
        while parts.booking_leases.sessions:
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


async def test_selections_run_beside_each_other_and_updates_overtake_them(transport: str) -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1), worker(2)), indexer=indexer)
    async with opened(parts, transport) as client, asyncio.TaskGroup() as group:
        selections = [group.create_task(client.select(f"r{n}", request=routing(4, seed=n))) for n in range(10)]
        assert (await client.update(free("nobody's"))).acknowledged == 1
        assert not any(each.done() for each in selections)
        indexer.may_answer.set()
        assert {(await each).rank.worker_id for each in selections} == {1, 2}


async def test_a_cancelled_selection_books_nothing(transport: str) -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        selecting = asyncio.create_task(client.select("a"))
        await until(lambda: indexer.queries)
        selecting.cancel()
        await asyncio.wait([selecting])
        # What was cancelled on the way is over once a later call is answered.
        await client.update(free("a"))
        indexer.may_answer.set()
        assert (await client.select("b")).rank.worker_id == 1
        assert [booking.key[0] for booking in parts.booking_table] == ["b"]


async def test_a_free_that_overtakes_its_selection_leaves_a_tombstone(transport: str) -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        selecting = asyncio.create_task(client.select("a"))
        await until(lambda: indexer.queries)
        await client.update(free("a"))
        indexer.may_answer.set()
        with pytest.raises(Exception, match="freed already"):
            await selecting
        assert (await client.update(reassert("a"))).acknowledged == 2
        assert parts.idle()


async def test_refusals_are_typed_and_the_session_goes_on(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        with pytest.raises(UnknownModel):
            await client.select("a", request=routing(model="other"))
        with pytest.raises(BadRequest) as caught:
            await client.update(free("a"), number=0)
        assert caught.value.info.field == "first_number"
        with pytest.raises(BadRequest):
            await client.update(*[free("a")] * 2, number=(1 << 64) - 1)
        await client.select("a")
        response = await client.update(
            BookingUpdate(),
            BookingUpdate(free=FreeRequest()),
            reassert("b", blocks=3),
            reassert("b", component=Component(namespace="ns", name="other")),
            free("a"),
        )
        assert response.acknowledged == 5
        assert [each.number for each in response.refused] == [1, 2, 3, 4]
        assert all(each.info.advice for each in response.refused)
        unknown = response.refused[3]
        assert isinstance(from_parts(unknown.code, unknown.message, unknown.info), NotFound)
        assert parts.idle()


async def test_a_defect_costs_its_update_only(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(view(worker(1)))
    monkeypatch.setattr(parts.bookings, "report_output", lambda _: 1 / 0)
    async with opened(parts, transport) as client:
        await client.select("a")
        response = await client.update(output("a", 16), free("a"))
        assert [each.number for each in response.refused] == [1]
        assert parts.idle()


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
    assert parts.booking_leases.sessions == 0


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
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with opened(parts, transport) as client:
        late = asyncio.create_task(client.select("a"))
        await until(lambda: indexer.queries)
        await client.open(lists=True)
        indexer.may_answer.set()
        with pytest.raises(SessionLost):
            await late
        assert parts.idle()


async def test_another_scheduler_takes_live_bookings_over(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.update(reassert("a", output_tokens=20))
        assert parts.load(1) == (6, 32, 1)
        # Re-asserted with more progress: merged by maximum.
        await client.update(reassert("a", output_tokens=3, prefill_complete=True))
        assert parts.load(1) == (6, 0, 1)
        assert (await client.select("a")).repeated
        await client.update(free("a"), reassert("a"))
        assert parts.idle()


async def test_a_booking_of_a_worker_that_is_not_registered_is_taken_over_all_the_same() -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts) as client:
        await client.update(reassert("a", worker_id=9))
        assert parts.load(9)[2] == 1
        await client.update(free("a"))
    assert parts.idle()


async def test_a_leased_booking_moves_into_the_session_that_reasserts_it() -> None:
    parts = Parts(view(worker(1)), grace=10)
    await parts.select(selecting("a", lease_ms=1000))
    async with opened(parts) as client:
        await client.update(reassert("a"))
        expire(parts, 1000)
        assert parts.load(1)[2] == 1
        await client.close()
    expire(parts, 10)
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
    assert parts.booking_leases.sessions == 0
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


async def test_an_update_that_is_repeated_is_applied_once(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.select("a")
        for _ in range(3):
            assert (await client.update(prefilled("a"), free("a"), number=1)).acknowledged == 2
        assert (await client.update(free("a"), free("b"), number=2)).acknowledged == 3
    assert parts.figure("kvrouter_scheduler_unknown_frees_total") == 1, "that of b"


async def test_an_update_ahead_of_an_earlier_one_is_not_applied(transport: str) -> None:
    parts = Parts(view(worker(1)))
    async with opened(parts, transport) as client:
        await client.select("a")
        assert (await client.update(free("a"), number=2)).acknowledged == 0
        assert parts.load(1)[2] == 1
        assert (await client.update(prefilled("a"), free("a"), number=1)).acknowledged == 2
        assert parts.idle()


async def test_an_opening_says_which_updates_are_missing(transport: str) -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with opened(parts, transport) as client:
        await client.select("a")
        await client.update(prefilled("a"), output("a", 16))
        await client.close()
        assert (await client.open("a", first_update=1)).acknowledged == 2
        # Updates up to 6 went to another Scheduler meanwhile.
        assert (await client.open("a", first_update=7)).acknowledged == 6
        assert (await client.update(free("a"), number=7)).acknowledged == 7
    assert parts.idle()
