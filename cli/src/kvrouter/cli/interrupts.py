"""Runs a command so that signals end it cleanly."""

from __future__ import annotations

import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal ended the command, which has cleaned up."""

    def __init__(self, which: signal.Signals) -> None:
        super().__init__(which.name)
        self.exit_status = 128 + which


def run_interruptibly(command: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine. The first SIGINT, SIGTERM or SIGHUP cancels it, so that it cleans up; the second one kills it.

    Raises:
        Interrupted: a signal ended it.
    """
    import asyncio

    return asyncio.run(_cancelled_by_signals(command))


async def _cancelled_by_signals(command: Coroutine[Any, Any, T]) -> T:
    import asyncio

    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    received: list[signal.Signals] = []

    def interrupt(which: signal.Signals) -> None:
        received.append(which)
        for each in _ENDING:
            loop.remove_signal_handler(each)
        if task is not None:
            task.cancel()

    for each in _ENDING:
        loop.add_signal_handler(each, interrupt, each)
    try:
        return await command
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
