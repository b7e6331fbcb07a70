"""Waits for conditions."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Waits until a condition holds; it may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            held = condition()
            if await held if inspect.isawaitable(held) else held:
                return
            # What a coroutine asks is usually another process, which needs its time as well.
            await asyncio.sleep(0.02 if inspect.isawaitable(held) else 0.001)
