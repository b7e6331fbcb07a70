"""``kvrouter top``: queries a system periodically and draws its state."""

from __future__ import annotations

import asyncio
import signal
import sys
import time

from kvrouter.cli.errors import CommandFailed
from kvrouter.cli.terminal import PlainConsole
from kvrouter.cli.top.frame import frame
from kvrouter.cli.top.sources import Where, open_sources
from kvrouter.runtime.overview.ranks import HitWindow
from kvrouter.runtime.overview.system import System
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

_WINDOW_SECONDS = 60.0
"""Time window of hit rates."""
_PIPE_WIDTH = 200


class _Picture:
    """A frame that adapts to the terminal's size whenever it is drawn."""

    def __init__(self, system: System, hit_rates: HitWindow, *, whole: bool) -> None:
        self._system = system
        self._hit_rates = hit_rates
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = None if self._whole else console.height
        yield frame(self._system, self._hit_rates, width=options.max_width, height=height)


async def top(where: Where, interval_seconds: float) -> None:
    """Draws until cancelled."""
    hit_rates = HitWindow(_WINDOW_SECONDS)
    resized = asyncio.Event()
    loop = asyncio.get_running_loop()
    console = PlainConsole()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    try:
        async with open_sources(where) as sources:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    due = time.monotonic() + interval_seconds
                    system = await sources.look()
                    hit_rates.take(system, time.monotonic())
                    live.update(_Picture(system, hit_rates, whole=False), refresh=True)
                    while await _resized_before(resized, due):
                        live.refresh()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def top_once(where: Where) -> None:
    """Prints one frame with every rank.

    Raises:
        CommandFailed: no Scheduler answered; the frame is printed all the same.
    """
    async with open_sources(where) as sources:
        system = await sources.look()
    hit_rates = HitWindow(_WINDOW_SECONDS)
    hit_rates.take(system, time.monotonic())
    # In a pipe, no columns should be cut off.
    console = PlainConsole(None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(_Picture(system, hit_rates, whole=True))
    if not system.statuses:
        raise CommandFailed("no Scheduler answers")


async def _resized_before(resized: asyncio.Event, due: float) -> bool:
    """Returns True when the terminal's size changes, or False at the time ``due``."""
    resized.clear()
    try:
        async with asyncio.timeout(max(0.0, due - time.monotonic())):
            await resized.wait()
    except TimeoutError:
        return False
    return True
