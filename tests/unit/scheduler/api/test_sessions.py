"""Sessions: calls beside each other on one stream, and bookings that live and die with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import BadRequest, DeadlineExceeded, SessionLost, from_parts
from kvrouter.scheduler.api import sessions as session_stream
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.v1.common_pb2 import Component, Rank
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.scheduler_pb2 import (
    CancelCall,
    FreeRequest,
    LiveBookings,
    MarkPrefillCompleteRequest,
    OpenSession,
    ReassertBooking,
    ReportOutputRequest,
    SessionHeartbeat,
    SessionRequest,
    SessionResponse,
)

from ..harness import POOL, Parts, ResidentBlocks, key, prompt, routing, selecting, view, worker


class Line:
    """A client's end of a session."""

    def __init__(
        self, responses: AsyncGenerator[SessionResponse, None], calls: asyncio.Queue[SessionRequest | None]
    ) -> None:
        self.responses = responses
        self.calls = calls

    def send(self, **call: object) -> None:
        self.calls.put_nowait(SessionRequest(**call))  # type: ignore[arg-type]

    async def answer(self) -> SessionResponse:
        async with asyncio.timeout(10):
            return await anext(self.responses)

    async def ask(self, **call: object) -> SessionResponse:
        self.send(**call)
        return await self.answer()


@asynccontextmanager
async def line(parts: Parts, session_id: str | None = "s") -> AsyncIterator[Line]:
    calls: asyncio.Queue[SessionRequest | None] = asyncio.Queue()

    async def requests() -> AsyncGenerator[SessionRequest, None]:
        while (call := await calls.get()) is not None:
            yield call

    async with aclosing(parts.sessions.serve(requests(), Deadline.never())) as responses:
        opened = Line(responses, calls)
        if session_id is not None:
            answer = await opened.ask(call_id=1, open=OpenSession(session_id=session_id, client_name="c"))
            assert answer.call_id == 1
            assert (answer.opened.grace_ms, answer.opened.scheduler_id) == (10_000, "s")
        yield opened


def reassert(request_id: str, *, worker_id: int = 1, blocks: int = 4, **fields: object) -> ReassertBooking:
    hashes = memoryview(prompt(blocks).sequence_hashes).cast("Q").tolist()
    known = {
        "booking": key(request_id),
        "rank": Rank(worker_id=worker_id),
        "component": Component(namespace=POOL.namespace, name=POOL.name),
        "sequence_hashes": hashes,
        "prompt_tokens": 64,
        "prefill_tokens": 32,
    }
    return ReassertBooking(**(known | fields))  # type: ignore[arg-type]


async def test_the_life_of_a_booking_on_a_stream() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts) as client:
        selected = await client.ask(call_id=2, select=selecting("a"))
        assert (selected.call_id, selected.select.rank.worker_id) == (2, 1)
        marked = await client.ask(call_id=3, mark_prefill_complete=MarkPrefillCompleteRequest(booking=key("a")))
        assert marked.mark_prefill_complete.known
        reported = await client.ask(call_id=4, report_output=ReportOutputRequest(booking=key("a"), output_tokens=1))
        assert reported.report_output.known
        assert parts.load(1) == (5, 0, 1)
        freed = await client.ask(call_id=5, free=FreeRequest(booking=key("a")))
        assert freed.free.known
        assert parts.idle()


async def test_a_stream_that_is_cancelled_while_it_ends_closes_its_session() -> None:
    """As where a write fails on a broken connection, and gRPC cancels the call for the same reason."""
    parts = Parts(view(worker(1)), grace=10)
    stopping = asyncio.Event()

    async def requests() -> AsyncGenerator[SessionRequest, None]:
        yield SessionRequest(call_id=1, open=OpenSession(session_id="s", client_name="c"))
        yield SessionRequest(call_id=2, reassert=reassert("r"))
        try:
            await asyncio.Event().wait()
        finally:
            stopping.set()
            await asyncio.sleep(0)  # what reads takes a moment to end

    async def serve() -> None:
        async with aclosing(parts.sessions.serve(requests(), Deadline.never())) as responses:
            async for _ in responses:
                pass

    serving = asyncio.create_task(serve())
    async with asyncio.timeout(10):
        while not len(parts.booking_table):
            await asyncio.sleep(0)
        serving.cancel()
        await stopping.wait()
        serving.cancel()
        await asyncio.wait([serving])
    assert serving.cancelled()
    parts.now += 11
    parts.bookings.expire()
    assert (len(parts.booking_table), parts.booking_leases.sessions) == (0, 0)


async def test_bookings_outlive_the_stream_by_the_grace() -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with line(parts) as client:
        await client.ask(call_id=2, select=selecting("a"))
    parts.now += 9.9
    parts.bookings.expire()
    assert parts.load(1)[2] == 1
    async with line(parts):
        parts.now += 100
        parts.bookings.expire()
        assert parts.load(1)[2] == 1
    parts.now += 10
    parts.bookings.expire()
    assert parts.idle()
    assert parts.booking_leases.sessions == 0
    assert parts.figure("kvrouter_scheduler_session_bookings_dropped_total") == 1


async def test_selections_run_beside_each_other_and_other_calls_overtake_them() -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1), worker(2)), indexer=indexer)
    async with line(parts) as client:
        for number in range(2, 12):
            client.send(call_id=number, select=selecting(f"r{number}", routing(4, seed=number)))
        overtaking = await client.ask(call_id=50, free=FreeRequest(booking=key("nobody's")))
        assert overtaking.call_id == 50
        indexer.may_answer.set()
        answers = [await client.answer() for _ in range(10)]
        assert {each.call_id for each in answers} == set(range(2, 12))
        assert all(each.HasField("select") for each in answers)


async def test_a_cancelled_selection_books_nothing_and_is_answered() -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with line(parts) as client:
        client.send(call_id=2, select=selecting("a"))
        answer = await client.ask(call_id=3, cancel=CancelCall(call_id=2))
        assert (answer.call_id, answer.failed.code) == (2, grpc.StatusCode.CANCELLED.value[0])
        indexer.may_answer.set()
        assert parts.idle()
        assert (await client.ask(call_id=4, select=selecting("b"))).HasField("select")


async def test_failed_calls_are_answered_typed_and_the_session_goes_on() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts) as client:
        failed = (await client.ask(call_id=2, select=selecting("a", routing(model="other")))).failed
        assert failed.info.reason == ErrorReason.ERROR_REASON_UNKNOWN_MODEL
        assert type(from_parts(failed.code, failed.message, failed.info)).__name__ == "UnknownModel"
        for call in (
            {"call_id": 3},
            {"call_id": 3, "open": OpenSession(session_id="again")},
            {"call_id": 0, "select": selecting("a")},
            {"call_id": 3, "select": selecting("a", session_id="another's")},
            {"call_id": 3, "free": FreeRequest()},
            {"call_id": 3, "reassert": reassert("a", blocks=3)},
            {"call_id": 3, "reassert": reassert("a", component=Component(namespace="ns", name="other"))},
        ):
            assert (await client.ask(**call)).failed.info.advice
        assert (await client.ask(call_id=4, select=selecting("a"))).HasField("select")


async def test_a_call_number_is_not_used_twice_at_a_time() -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with line(parts) as client:
        client.send(call_id=2, select=selecting("a"))
        assert (await client.ask(call_id=2, select=selecting("b"))).failed.info.field == "call_id"
        indexer.may_answer.set()
        assert (await client.answer()).HasField("select")


@pytest.mark.parametrize(
    "first",
    [
        SessionRequest(call_id=1, select=selecting("a")),
        SessionRequest(call_id=1),
        SessionRequest(call_id=1, open=OpenSession()),
        SessionRequest(call_id=1, open=OpenSession(session_id="x" * 257)),
    ],
)
async def test_the_first_message_opens_the_session(first: SessionRequest) -> None:
    parts = Parts(view(worker(1)))
    async with line(parts, None) as client:
        client.calls.put_nowait(first)
        with pytest.raises(BadRequest):
            await client.answer()
    assert parts.booking_leases.sessions == 0


async def test_a_client_that_never_says_anything_leaves_nothing() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts, None) as client:
        client.calls.put_nowait(None)
        with pytest.raises(StopAsyncIteration):
            await client.answer()
    assert parts.booking_leases.sessions == 0


async def test_the_longest_names_of_clients_and_components_make_a_session() -> None:
    longest = "f" * 64 + "." + "c" * 64 + ".31"
    parts = Parts(view(worker(1)))
    async with line(parts, longest) as client:
        assert (await client.ask(call_id=2, select=selecting("a"))).HasField("select")


async def test_a_stream_that_never_opens_a_session_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_stream, "_OPENING_SECONDS", 0.01)
    parts = Parts(view(worker(1)))
    async with line(parts, None) as client:
        with pytest.raises(DeadlineExceeded):
            await client.answer()
    assert parts.booking_leases.sessions == 0


async def test_a_session_that_is_open_may_be_silent_for_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_stream, "_OPENING_SECONDS", 0.01)
    parts = Parts(view(worker(1)))
    async with line(parts) as client:
        await asyncio.sleep(0.03)
        parts.now += 1000
        parts.bookings.expire()
        assert (await client.ask(call_id=2, select=selecting("a"))).HasField("select")
        assert parts.booking_leases.sessions == 1
    parts.now += 10
    parts.bookings.expire()
    assert parts.booking_leases.sessions == 0
    assert parts.idle()


async def test_answers_come_although_the_client_sends_no_more() -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with line(parts) as client:
        client.send(call_id=2, select=selecting("a"))
        client.calls.put_nowait(None)
        while not indexer.queries:
            await asyncio.sleep(0)
        indexer.may_answer.set()
        assert (await client.answer()).HasField("select")
        with pytest.raises(StopAsyncIteration):
            await client.answer()


async def test_a_second_stream_takes_the_session_over() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts) as old:
        await old.ask(call_id=2, select=selecting("a"))
        async with line(parts) as new:
            with pytest.raises(SessionLost):
                await old.answer()
            await old.responses.aclose()
            parts.now += 1000
            parts.bookings.expire()
            assert parts.load(1)[2] == 1
            assert (await new.ask(call_id=2, free=FreeRequest(booking=key("a")))).free.known


async def test_another_scheduler_takes_live_bookings_over() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts) as client:
        taken = await client.ask(call_id=2, reassert=reassert("a", output_tokens=20))
        assert not taken.reasserted.known
        assert parts.load(1) == (6, 32, 1)
        # Re-asserted with more progress: merged by maximum.
        taken = await client.ask(call_id=3, reassert=reassert("a", output_tokens=3, prefill_complete=True))
        assert taken.reasserted.known
        assert parts.load(1) == (6, 0, 1)
        assert (await client.ask(call_id=4, select=selecting("a"))).select.repeated
        assert (await client.ask(call_id=5, free=FreeRequest(booking=key("a")))).free.known
        assert (await client.ask(call_id=6, reassert=reassert("a"))).reasserted.known
        assert parts.idle()


async def test_a_booking_of_a_worker_that_is_not_registered_is_taken_over_all_the_same() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts) as client:
        await client.ask(call_id=2, reassert=reassert("a", worker_id=9))
        assert parts.load(9)[2] == 1
        await client.ask(call_id=3, free=FreeRequest(booking=key("a")))
    assert parts.idle()


async def test_a_leased_booking_moves_into_the_session_that_reasserts_it() -> None:
    parts = Parts(view(worker(1)), grace=10)
    await parts.select(selecting("a", lease_ms=1000))
    async with line(parts) as client:
        assert (await client.ask(call_id=2, reassert=reassert("a"))).reasserted.known
        parts.now += 1000
        parts.bookings.expire()
        assert parts.load(1)[2] == 1
    parts.now += 10
    parts.bookings.expire()
    assert parts.idle()


async def test_a_thousand_sessions_that_come_and_go_leave_nothing() -> None:
    parts = Parts(view(worker(1)), options=RoutingOptions(mode="round-robin"), grace=10)
    for number in range(1000):
        async with line(parts, f"s{number}") as client:
            client.send(call_id=2, select=selecting(f"r{number}"))
            if number % 2:
                await client.answer()
    parts.now += 10
    parts.bookings.expire()
    assert parts.idle()
    assert parts.booking_leases.sessions == 0
    assert parts.sessions._streams == {}


def opening(opening_number: int, *live: str) -> OpenSession:
    listed = LiveBookings(bookings=[key(each) for each in live])
    return OpenSession(session_id="s", client_name="c", opening_number=opening_number, live=listed)


async def test_a_session_that_returns_frees_bookings_that_ended_elsewhere() -> None:
    parts = Parts(view(worker(1)), grace=10)
    async with line(parts, None) as before:
        await before.ask(call_id=1, open=opening(1))
        for number, name in enumerate(["kept", "ended", "asked again"]):
            await before.ask(call_id=2 + number, select=selecting(name))
    async with line(parts, None) as after:
        assert (await after.ask(call_id=1, open=opening(2, "kept", "asked again"))).HasField("opened")
        assert {booking.key[0] for booking in parts.booking_table} == {"kept", "asked again"}
        assert (await after.ask(call_id=2, select=selecting("asked again"))).select.repeated


async def test_an_opening_that_comes_late_is_refused_and_changes_nothing() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts, None) as current:
        await current.ask(call_id=1, open=opening(2))
        await current.ask(call_id=2, select=selecting("a"))
        async with line(parts, None) as late:
            with pytest.raises(SessionLost):
                await late.ask(call_id=1, open=opening(1))
        assert (await current.ask(call_id=3, free=FreeRequest(booking=key("a")))).free.known


async def test_a_list_that_names_no_booking_is_refused_and_opens_nothing() -> None:
    parts = Parts(view(worker(1)))
    async with line(parts, None) as client:
        with pytest.raises(BadRequest):
            await client.ask(call_id=1, open=opening(1, ""))
    assert parts.booking_leases.sessions == 0


async def test_late_selections_of_the_former_stream_are_not_booked() -> None:
    indexer = ResidentBlocks()
    indexer.may_answer.clear()
    parts = Parts(view(worker(1)), indexer=indexer)
    async with line(parts, None) as old:
        await old.ask(call_id=1, open=opening(1))
        old.send(call_id=2, select=selecting("a"))
        while not indexer.queries:
            await asyncio.sleep(0)
        async with line(parts, None) as new:
            await new.ask(call_id=1, open=opening(2))
            old.send(call_id=3, reassert=reassert("b"))
            indexer.may_answer.set()
            with pytest.raises(SessionLost):
                await old.answer()
            assert (await new.ask(call_id=2, heartbeat=SessionHeartbeat())).HasField("heartbeat")
            assert parts.idle()


async def test_a_client_that_stops_its_heartbeats_loses_its_session_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_stream, "_TICK_SECONDS", 0.001)
    parts = Parts(view(worker(1)), grace=10)
    async with line(parts, None) as client:
        await client.ask(call_id=1, open=opening(1))
        await client.ask(call_id=2, select=selecting("a"))
        await client.ask(call_id=3, heartbeat=SessionHeartbeat())
        with pytest.raises(SessionLost):
            await client.answer()
    parts.now += 10
    parts.bookings.expire()
    assert parts.idle()
    async with line(parts, None) as client:
        await client.ask(call_id=1, open=opening(2, "a"))
        assert not (await client.ask(call_id=2, reassert=reassert("a"))).reasserted.known
        assert parts.load(1)[2] == 1
