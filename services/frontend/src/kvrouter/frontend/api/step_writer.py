"""Writes to many clients at the end of a step of the event loop.

A message of a worker has a token for each of its requests, and each of these has a client of its own. Each write is a
system call, and wakes its client up. Made one after the other they cost less than between the work that makes the
events, whose code and data they would push out of the processor's caches; and what one client gets in a step is one
write, however many messages it came in.
"""

from __future__ import annotations

import asyncio


class StepWriter:
    """Collects what a step of the event loop writes. The order of what one client gets does not change."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Transport, bytes] = {}

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Writes data to a client when this step ends, or with the next ``flush``."""
        pending = self._pending
        if not pending:
            asyncio.get_running_loop().call_soon(self.flush)
        before = pending.get(transport)
        pending[transport] = data if before is None else before + data

    def flush(self) -> None:
        """Writes at once what was collected. What belongs to clients that have left is dropped."""
        pending, self._pending = self._pending, {}
        for transport, data in pending.items():
            if not transport.is_closing():  # Otherwise aiohttp cancels the handler.
                transport.write(data)
