"""Bookings of a client's session end with it, and with it only."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, TokenIds
from kvrouter.v1.errors import BadRequest, RequestIdReused
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
    KeepSessionRequest,
)
from kvrouter.v1.scheduler_pb2 import DrainWorkerRequest

from .gateway import MODEL, System

KEY = BookingKey(request_id="mine")


def booked(session_id: str, key: BookingKey = KEY) -> FrontendServiceSelectWorkerRequest:
    routing = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(64)))
    return FrontendServiceSelectWorkerRequest(request=routing, booking=key, session_id=session_id)


async def test_bookings_of_a_session_are_freed_when_its_call_ends(system: System) -> None:
    await system.start_worker(1)
    keeping = system.client.keep_session(KeepSessionRequest(session_id="s"), deadline=Deadline.never())
    async with aclosing(keeping):
        assert (await anext(keeping)).grace_ms == 3000
        await system.client.select_worker(booked("s"), deadline=Deadline.after(10))
        marked = await system.client.mark_prefill_complete(
            FrontendServiceMarkPrefillCompleteRequest(booking=KEY), deadline=Deadline.after(10)
        )
        assert marked.known
        assert await system.booked() == [1]
    await system.until_idle()


async def test_a_session_that_is_opened_again_keeps_its_bookings(system: System) -> None:
    await system.start_worker(1)
    request = KeepSessionRequest(session_id="s", client_name="a client")
    first = system.client.keep_session(request, deadline=Deadline.never())
    await anext(first)
    await system.client.select_worker(booked("s"), deadline=Deadline.after(10))
    second = system.client.keep_session(request, deadline=Deadline.never())
    async with aclosing(second):
        await anext(second)
        released = await system.client.free(FrontendServiceFreeRequest(booking=KEY), deadline=Deadline.after(10))
        assert released.known
        with pytest.raises(RequestIdReused):
            await system.client.select_worker(booked("s"), deadline=Deadline.after(10))
        await first.aclose()
        await system.client.select_worker(booked("s", BookingKey(request_id="2")), deadline=Deadline.after(10))
        assert await system.booked() == [1]
    await system.until_idle()


async def test_a_booking_may_come_before_the_call_that_keeps_its_session(system: System) -> None:
    await system.start_worker(1)
    first = await system.client.select_worker(booked("s"), deadline=Deadline.after(10))
    second = await system.client.select_worker(booked("s", BookingKey(request_id="2")), deadline=Deadline.after(10))
    assert (first.session_opened, second.session_opened) == (True, False)
    keeping = system.client.keep_session(KeepSessionRequest(session_id="s"), deadline=Deadline.never())
    async with aclosing(keeping):
        await anext(keeping)
        assert await system.booked() == [2]
    await system.until_idle()


async def test_a_booking_is_restored_at_its_rank_though_the_worker_is_draining_and_busy(system: System) -> None:
    await system.start_worker(1)
    await system.start_worker(2)
    request = booked("s")
    request.restores = True
    request.request.constraints.worker_id = 1
    request.request.constraints.dp_rank = 0
    request.request.overrides.active_decode_blocks_threshold = 0.0
    (view,) = system.runtime.directory.components.values()
    draining = DrainWorkerRequest(component=view.descriptor.component, worker_id=1)
    await system.scheduler.drain_worker(draining, deadline=Deadline.after(10))
    async with asyncio.timeout(30):
        while 1 in await system.loads():
            await asyncio.sleep(0.01)
    restored = await system.client.select_worker(request, deadline=Deadline.after(10))
    assert (restored.selection.rank.worker_id, restored.selection.repeated) == (1, False)
    again = await system.client.select_worker(request, deadline=Deadline.after(10))
    assert again.selection.repeated
    request.request.constraints.ClearField("dp_rank")
    with pytest.raises(BadRequest, match="rank of the booking is missing"):
        await system.client.select_worker(request, deadline=Deadline.after(10))
    released = await system.client.free(FrontendServiceFreeRequest(booking=KEY), deadline=Deadline.after(10))
    assert released.known


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (KeepSessionRequest(), "session_id"),
        (KeepSessionRequest(session_id="é" * 65), "session_id"),
        (KeepSessionRequest(session_id="s", client_name="n" * 65), "client_name"),
    ],
)
async def test_a_session_with_an_invalid_name_is_refused(
    system: System, request_: KeepSessionRequest, field: str
) -> None:
    keeping = system.client.keep_session(request_, deadline=Deadline.after(10))
    with pytest.raises(BadRequest) as refused:
        await anext(keeping)
    assert refused.value.info.field == field
