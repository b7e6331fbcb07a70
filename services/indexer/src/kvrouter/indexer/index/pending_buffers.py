"""Keeps the batches of ranks during their resync, up to a memory bound.

The batches of a *retained* buffer are not applied yet, because events before them are missing. Those of another buffer
are applied as they arrive, and again after the worker's state was loaded.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from kvrouter.core import Rank

MAX_BYTES = 8 << 20
"""Maximum memory of one rank's batches: about 16 of the largest size."""

MAX_ALL_BYTES = 256 << 20
"""Maximum memory of all ranks' batches. Thousands of ranks may return together, each with a full buffer."""


class _Sized(Protocol):
    @property
    def memory_bytes(self) -> int: ...


_M = TypeVar("_M", bound=_Sized)


class PendingBuffer(Generic[_M]):
    """Batches of one rank, oldest first. Over the bound the oldest go: the fetched state most likely contains them."""

    def __init__(self, *, retained: bool, max_bytes: int = MAX_BYTES) -> None:
        """Creates an empty buffer of at most ``max_bytes``; ``retained`` is explained in the module docstring."""
        self.retained = retained
        self.dropped = 0
        """Batches dropped because of the bound."""
        self.requested = 0
        """Number of leading batches from before the call to the worker. If its state lacks them, they are untrue."""
        self._batches: deque[_M] = deque()
        self.bytes = 0
        """Memory of the batches."""
        self._max_bytes = max_bytes

    def add(self, batch: _M, *, crowded: bool = False) -> int:
        """Adds a batch, and drops the oldest ones over the bound. Returns the change of ``bytes``.

        The newest batch always stays. If the buffers of all ranks are ``crowded``, only it stays.
        """
        before = self.bytes
        self._batches.append(batch)
        self.bytes += batch.memory_bytes
        while self.bytes > (0 if crowded else self._max_bytes) and len(self._batches) > 1:
            self.bytes -= self._batches.popleft().memory_bytes
            self.dropped += 1
            self.requested = max(0, self.requested - 1)
        return self.bytes - before

    def mark_requested(self) -> None:
        """Marks the present batches as older than the call to the worker."""
        self.requested = len(self._batches)

    def batches(self) -> list[_M]:
        """Returns the batches, oldest first."""
        return list(self._batches)


class PendingBuffers(Generic[_M]):
    """The pending buffers of all ranks."""

    def __init__(self) -> None:
        self._buffers: dict[Rank, PendingBuffer[_M]] = {}
        self.bytes = 0
        """Memory of all batches."""

    def get(self, rank: Rank) -> PendingBuffer[_M] | None:
        """Returns the buffer of a rank; None if there is none."""
        return self._buffers.get(rank)

    def open(self, rank: Rank, *, retained: bool) -> PendingBuffer[_M]:
        """Returns the buffer of a rank. Creates one if there is none; ``retained`` applies to a new one only."""
        return self._buffers.setdefault(rank, PendingBuffer(retained=retained))

    def keep(self, rank: Rank, batch: _M) -> None:
        """Adds a batch to the buffer of its rank, which must exist."""
        self.bytes += self._buffers[rank].add(batch, crowded=self.bytes >= MAX_ALL_BYTES)

    def take(self, rank: Rank) -> list[_M]:
        """Removes the buffer of a rank. Returns its batches, oldest first; empty if there is none."""
        buffer = self._buffers.pop(rank, None)
        if buffer is None:
            return []
        self.bytes -= buffer.bytes
        return buffer.batches()
