"""Slots of engines: how many are free, and how long requests take."""

from __future__ import annotations

import math

import numpy as np
from kvrouter.scheduler.load.slots import DISPATCH_S, LEAST, WINDOW, BookingPeaks, TimeInFlight, capacity, free_slots

SLOTS = np.array([8.0, np.inf, 1.0])
RANK = (1, 0)


def test_the_mean_time_in_flight_is_known_after_some_requests() -> None:
    time = TimeInFlight()
    for number in range(LEAST):
        assert time.seconds == math.inf
        time.began(2.0 * number)
        time.ended(2.0 * number + 0.5)
    assert time.seconds == 0.5


def test_requests_at_the_same_time_count_each() -> None:
    time = TimeInFlight()
    for _ in range(LEAST):
        time.began(1.0)
    for _ in range(LEAST):
        time.ended(4.0)
    assert time.seconds == 3.0


def test_the_mean_follows_a_change() -> None:
    time, now = TimeInFlight(), 0.0
    for seconds in (0.1, 1.0):
        for _ in range(4 * WINDOW):
            time.began(now)
            now += seconds
            time.ended(now)
    assert 0.9 < time.seconds <= 1.0


def test_requests_that_end_during_a_dispatch_may_wait_in_the_engine() -> None:
    assert capacity(SLOTS, math.inf).tolist() == [8, np.inf, 1]
    assert capacity(SLOTS, 8 * DISPATCH_S).tolist() == [9, np.inf, 1]
    assert capacity(SLOTS, DISPATCH_S / 2).tolist() == [16, np.inf, 2]
    assert capacity(SLOTS, 0.0).tolist() == [16, np.inf, 2]


def test_bookings_and_requests_of_others_take_slots_but_never_the_last_one() -> None:
    booked = np.array([3, 3, 0])
    assert free_slots(SLOTS, SLOTS, booked, None).tolist() == [5, np.inf, 1]
    assert free_slots(SLOTS, SLOTS, booked, np.array([2, 2, 5])).tolist() == [3, np.inf, 1]
    assert free_slots(SLOTS, SLOTS, np.array([0, 0, 0]), np.array([99, 99, 99])).tolist() == [1, np.inf, 1]


def test_a_report_is_compared_with_the_most_bookings_since_the_one_before_the_last() -> None:
    peaks = BookingPeaks()
    for bookings in (1, 5, 2):
        peaks.booked(RANK, bookings)
    assert peaks.reported(RANK, 2) == 5
    assert peaks.reported(RANK, 2) == 5
    assert peaks.reported(RANK, 1) == 2
    peaks.booked(RANK, 7)
    peaks.forget(RANK)
    assert peaks.reported(RANK, 0) == 0
