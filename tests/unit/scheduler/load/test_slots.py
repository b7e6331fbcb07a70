"""Slots of engines: how many are free, and how long requests take."""

from __future__ import annotations

import math

import numpy as np
from kvrouter.scheduler.load.slots import DISPATCH_S, capacity, request_limits

SLOTS = np.array([8.0, np.inf, 1.0])


def test_requests_that_end_during_a_dispatch_may_wait_in_the_engine() -> None:
    assert capacity(SLOTS, math.inf).tolist() == [8, np.inf, 1]
    assert capacity(SLOTS, 8 * DISPATCH_S).tolist() == [9, np.inf, 1]
    assert capacity(SLOTS, DISPATCH_S / 2).tolist() == [16, np.inf, 2]
    assert capacity(SLOTS, 0.0).tolist() == [16, np.inf, 2]


def test_requests_of_others_take_slots_but_never_the_last_one() -> None:
    assert request_limits(SLOTS, SLOTS, None).tolist() == [8, np.inf, 1]
    assert request_limits(SLOTS, SLOTS, np.array([2, 2, 5])).tolist() == [6, np.inf, 1]
    assert request_limits(SLOTS, SLOTS, np.array([99, 99, 99])).tolist() == [1, np.inf, 1]
