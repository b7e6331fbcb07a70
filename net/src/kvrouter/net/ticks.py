"""Coalesces timers, so that idle processes wake less often.

To wake an idle process costs more than most of its timers and messages do. Timers that may end early or late end at
multiples of their interval, and constant intervals are multiples of ``TICK_SECONDS``. Periodic messages are sent at
multiples of ``TICK_SECONDS``. Multiples are counted on the wall clock as it was when the process started, so processes
wake at the same moments.
"""

from __future__ import annotations

import asyncio
import math
import time

TICK_SECONDS = 0.2
_LEAST_SHARE = 0.25
"""Least part of an interval to wait."""
_LEAST_SECONDS = 5 * TICK_SECONDS
"""Shortest interval between messages to align."""
REST_PER_WORK = 20
"""Pause after work, as a multiple of its processor time."""
_LONGEST_REST_SECONDS = 1.0
_WALL_CLOCK_MS = round(1000 * (time.time() - time.monotonic()))


def _now() -> float:
    # In whole milliseconds, as event loops count: timers for one moment end in one of them.
    return (int(1000 * time.monotonic()) + _WALL_CLOCK_MS) / 1000


def seconds_to_tick(seconds: float) -> float:
    """Returns the time to the next multiple of an interval, seconds.

    It is at least a quarter of the interval, since a timer may be early, and work that it started may be late.
    """
    now = _now()
    return (math.floor(now / seconds + _LEAST_SHARE) + 1) * seconds - now


async def tick(seconds: float) -> None:
    """Waits until the next multiple of an interval, as ``seconds_to_tick`` has it."""
    await asyncio.sleep(seconds_to_tick(seconds))


def seconds_to_send(seconds: float) -> float:
    """Returns an interval between periodic messages, rounded to end at a multiple of ``TICK_SECONDS``.

    Messages of thousands of idle workers arrive together then, and wake their receivers less often. Intervals below
    a second stay as they are.
    """
    if seconds < _LEAST_SECONDS:
        return seconds
    latest = _now() + seconds + TICK_SECONDS / 2
    return seconds + TICK_SECONDS / 2 - latest % TICK_SECONDS


def seconds_to_rest(began: float) -> float:
    """Returns the pause after work that would otherwise be repeated at once: up to 1 s.

    ``began``: ``time.thread_time()`` when the work began. While the task awaits, the work of other tasks counts too.
    """
    return min(_LONGEST_REST_SECONDS, REST_PER_WORK * (time.thread_time() - began))
