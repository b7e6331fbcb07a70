"""Coalesces timers, so that idle processes wake less often.

To wake an idle process costs more than most of its timers and messages do. Timers that may end early or late end at
multiples of their interval on the monotonic clock; constant intervals are multiples of ``TICK_SECONDS``. Periodic
messages of workers are sent at multiples of 100 ms on the wall clock.
"""

from __future__ import annotations

import asyncio
import math
import time

TICK_SECONDS = 0.2
_LEAST_SHARE = 0.25
"""Least part of an interval to wait."""


def seconds_to_tick(seconds: float) -> float:
    """Returns the time to the next multiple of an interval, seconds.

    It is at least a quarter of the interval, since a timer may be early, and work that it started may be late.
    """
    now = time.monotonic()
    return (math.floor(now / seconds + _LEAST_SHARE) + 1) * seconds - now


async def tick(seconds: float) -> None:
    """Waits until the next multiple of an interval, as ``seconds_to_tick`` has it."""
    await asyncio.sleep(seconds_to_tick(seconds))


_SEND_SECONDS = 0.1
"""Processes send their periodic messages at multiples of it."""
_LEAST_SECONDS = 5 * _SEND_SECONDS
"""Shortest interval to align."""


def seconds_to_send(seconds: float) -> float:
    """Returns an interval between periodic messages, rounded to end at a multiple of 100 ms on the wall clock.

    Messages of thousands of idle workers arrive together then, and wake their receivers less often. Intervals below
    500 ms stay as they are.
    """
    if seconds < _LEAST_SECONDS:
        return seconds
    latest = time.time() + seconds + _SEND_SECONDS / 2
    return seconds + _SEND_SECONDS / 2 - latest % _SEND_SECONDS
