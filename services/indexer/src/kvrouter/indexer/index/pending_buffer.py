"""The batches of one rank that wait, or are kept, while its state is fetched from its worker."""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_BYTES = 8 << 20
"""Encoded batches that are kept of one rank: some 16 of the largest."""

MAX_ALL_BYTES = 256 << 20
"""Those of all ranks of a component: where thousands come back at once, each could have its most."""


class _Sized(Protocol):
    @property
    def data(self) -> bytes: ...


_M = TypeVar("_M", bound=_Sized)


class PendingBuffer(Generic[_M]):
    """Messages in order. Beyond the bound the oldest go: the state that is fetched contains them most likely."""

    def __init__(self, *, retained: bool, max_bytes: int = MAX_BYTES) -> None:
        """``held_back`` says that the messages are not applied yet, because events before them are missing."""
        self.retained = retained
        self.dropped = 0
        """Messages that went for the bound."""
        self.requested = 0
        """Oldest messages that came before the worker was asked: its answer knows what they say, or they are untrue."""
        self._messages: deque[_M] = deque()
        self.bytes = 0
        """Of the messages that are kept."""
        self._max_bytes = max_bytes

    def add(self, message: _M, *, crowded: bool = False) -> int:
        """Keeps a message; the newest one always stays, and alone where it is ``crowded``. Returns the bytes gained."""
        before = self.bytes
        self._messages.append(message)
        self.bytes += len(message.data)
        while self.bytes > (0 if crowded else self._max_bytes) and len(self._messages) > 1:
            self.bytes -= len(self._messages.popleft().data)
            self.dropped += 1
            self.requested = max(0, self.requested - 1)
        return self.bytes - before

    def mark_requested(self) -> None:
        """Notes that the worker is asked now."""
        self.requested = len(self._messages)

    def messages(self) -> list[_M]:
        """What is kept, oldest first."""
        return list(self._messages)
