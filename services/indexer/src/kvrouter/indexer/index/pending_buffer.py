"""The batches of ranks that wait, or are kept, while the ranks' state is fetched from their workers."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from kvrouter.core import Rank

MAX_BYTES = 8 << 20
"""Memory of the batches that are kept of one rank: some 16 of the largest."""

MAX_ALL_BYTES = 256 << 20
"""Those of all ranks of a component: where thousands come back at once, each could have its most."""


class _Sized(Protocol):
    @property
    def memory_bytes(self) -> int: ...


_M = TypeVar("_M", bound=_Sized)


class PendingBuffer(Generic[_M]):
    """Batches in order. Beyond the bound the oldest go: the state that is fetched contains them most likely."""

    def __init__(self, *, retained: bool, max_bytes: int = MAX_BYTES) -> None:
        """``retained`` says that the batches are not applied yet, because events before them are missing."""
        self.retained = retained
        self.dropped = 0
        """Batches that went for the bound."""
        self.requested = 0
        """Oldest batches that came before the worker was asked: its answer knows what they say, or they are untrue."""
        self._batches: deque[_M] = deque()
        self.bytes = 0
        """Memory of the batches that are kept."""
        self._max_bytes = max_bytes

    def add(self, batch: _M, *, crowded: bool = False) -> int:
        """Keeps a batch; the newest one always stays, and alone where it is ``crowded``. Returns the bytes gained."""
        before = self.bytes
        self._batches.append(batch)
        self.bytes += batch.memory_bytes
        while self.bytes > (0 if crowded else self._max_bytes) and len(self._batches) > 1:
            self.bytes -= self._batches.popleft().memory_bytes
            self.dropped += 1
            self.requested = max(0, self.requested - 1)
        return self.bytes - before

    def mark_requested(self) -> None:
        """Notes that the worker is asked now."""
        self.requested = len(self._batches)

    def batches(self) -> list[_M]:
        """Returns what is kept, oldest first."""
        return list(self._batches)


class PendingBuffers(Generic[_M]):
    """The buffers of all ranks that are being repaired."""

    def __init__(self) -> None:
        self._buffers: dict[Rank, PendingBuffer[_M]] = {}
        self.bytes = 0
        """Memory of all batches that are kept."""

    def get(self, rank: Rank) -> PendingBuffer[_M] | None:
        """Returns the buffer of a rank; None if it has none."""
        return self._buffers.get(rank)

    def open(self, rank: Rank, *, retained: bool) -> PendingBuffer[_M]:
        """Returns the buffer of a rank, which is made if it has none."""
        return self._buffers.setdefault(rank, PendingBuffer(retained=retained))

    def keep(self, rank: Rank, batch: _M) -> None:
        """Keeps a batch of a rank that has a buffer."""
        self.bytes += self._buffers[rank].add(batch, crowded=self.bytes >= MAX_ALL_BYTES)

    def take(self, rank: Rank) -> list[_M]:
        """Removes the buffer of a rank; returns its batches, oldest first."""
        buffer = self._buffers.pop(rank, None)
        if buffer is None:
            return []
        self.bytes -= buffer.bytes
        return buffer.batches()
