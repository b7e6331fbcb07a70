"""The event loop of all blocking clients of a process.

It is never closed: grpc.aio delivers the events of all loops of a process through each of them, and fails in the others
when one is closed.
"""

from __future__ import annotations

import asyncio
import threading


class _LoopThread:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon, so that it does not keep the program from ending.
        self.thread = threading.Thread(target=self.loop.run_forever, name="kvrouter clients", daemon=True)
        self.thread.start()


_lock = threading.Lock()
_running: list[_LoopThread] = []


def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop. The first call starts its thread, and the first one after a fork another one."""
    with _lock:
        if not (_running and _running[-1].thread.is_alive()):
            _running.append(_LoopThread())
        return _running[-1].loop
