"""Which bookings count when the call that makes them fails, or is overtaken by their release."""

from __future__ import annotations

import asyncio

import pytest
from kvrouter.frontend.access.client_bookings import ClientBookings
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.v1.common_pb2 import BookingKey, Stage
from kvrouter.v1.errors import BadRequest, DeadlineExceeded, DependencyAway, RateLimited
from prometheus_client import CollectorRegistry

KEY = BookingKey(request_id="a")


def bookings(most: int = 10) -> ClientBookings:
    settings = FrontendSettings(max_bookings_per_caller=most, max_sessions_per_caller=most)
    return ClientBookings(settings, None, CollectorRegistry())


def book(counted: ClientBookings, error: BaseException | None = None, key: BookingKey = KEY) -> None:
    with counted.booking(key, "", 60_000, 10, 0):
        if error is not None:
            raise error


async def test_a_booking_that_is_refused_does_not_count() -> None:
    counted = bookings()
    with pytest.raises(BadRequest):
        book(counted, BadRequest("no"))
    assert len(counted) == 0


@pytest.mark.parametrize("error", [DeadlineExceeded(), DependencyAway("gone"), asyncio.CancelledError()])
async def test_a_booking_that_may_have_been_made_counts_until_it_is_released(error: BaseException) -> None:
    counted = bookings()
    with pytest.raises(type(error)):
        book(counted, error)
    assert len(counted) == 1
    counted.release(KEY)
    assert len(counted) == 0


async def test_a_key_without_a_stage_is_that_of_a_whole_request() -> None:
    counted = bookings()
    book(counted)
    counted.release(BookingKey(request_id="a", stage=Stage.STAGE_WHOLE))
    assert len(counted) == 0


async def test_a_release_that_overtakes_its_booking_ends_nothing() -> None:
    counted = bookings()
    with counted.booking(KEY, "", 60_000, 10, 0):
        counted.release(KEY)
    assert len(counted) == 1


async def test_a_repeated_booking_counts_once() -> None:
    counted = bookings(1)
    book(counted)
    book(counted)
    with pytest.raises(RateLimited):
        book(counted, key=BookingKey(request_id="b"))
    assert len(counted) == 1
