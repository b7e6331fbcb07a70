"""Timers that end together.

To wake an idle process costs more than most of its timers do, so those that only have to run now and then end at
multiples of their interval on one clock. Intervals are multiples of ``TICK_SECONDS``, as far as they are constants.
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
