"""Times at which timers and messages come together.

To wake an idle process costs more than most of its timers and messages do. Timers that only have to run now and then
end at multiples of their interval on one clock; constant intervals are multiples of ``TICK_SECONDS``. What thousands of
idle workers send arrives together too.
"""

from __future__ import annotations

import asyncio
import math
import time

TICK_SECONDS = 0.2
_LEAST_SHARE = 0.25


def seconds_to_tick(seconds: float) -> float:
    """Returns the time to the next multiple of an interval, seconds.

    It is at least a quarter of the interval, since a timer may be early, and work that it started may be late.
    """
    now = time.monotonic()
    return (math.floor(now / seconds + _LEAST_SHARE) + 1) * seconds - now


async def tick(seconds: float) -> None:
    """Waits until the next multiple of an interval, as ``seconds_to_tick`` has it."""
    await asyncio.sleep(seconds_to_tick(seconds))


_MEETING_SECONDS = 0.02
_LEAST_SECONDS = 5 * _MEETING_SECONDS


def seconds_to_meeting(seconds: float) -> float:
    """Returns a time close to ``seconds`` after which many processes send what can wait for each other.

    It ends at a multiple of 20 ms by the wall clock, so that messages of thousands of idle workers arrive together and
    wake their receivers less often. Short times stay as they are.
    """
    if seconds < _LEAST_SECONDS:
        return seconds
    latest = time.time() + seconds + _MEETING_SECONDS / 2
    return seconds + _MEETING_SECONDS / 2 - latest % _MEETING_SECONDS
