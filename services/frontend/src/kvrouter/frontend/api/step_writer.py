"""Writes to many clients at the end of a step of the event loop.

A message of a worker has tokens for many clients. Each write is a system call, and wakes its client up. Writes cost
less back to back than between the work that makes the events. What one client gets in a step is one write, however many
messages it came in.
"""

from __future__ import annotations

import asyncio


class StepWriter:
    """Collects what a step of the event loop writes. The order of what one client gets does not change."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.Transport, list[bytes]] = {}

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """Writes data to a client when this step ends, or with the next ``flush``."""
        pending = self._pending
        if not pending:
            asyncio.get_running_loop().call_soon(self.flush)
        before = pending.get(transport)
        if before is None:
            pending[transport] = [data]
        else:
            before.append(data)

    def flush(self) -> None:
        """Writes at once what was collected. What belongs to clients that have left is dropped."""
        pending, self._pending = self._pending, {}
        for transport, data in pending.items():
            if not transport.is_closing():  # Otherwise aiohttp cancels the handler.
                transport.write(b"".join(data))
