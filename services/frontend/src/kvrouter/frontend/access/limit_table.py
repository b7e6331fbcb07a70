"""Counters of limits in memory the processes of a Frontend share, so a limit holds for all of them together.

Each key and tenant with a limit has a row: two rates and the running requests of each process. A rate is a leaky
bucket: ``used`` drains at the permitted rate, and a request is admitted if its amount fits. A row of zeros is
unused.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import BinaryIO

_ROWS = 16_384
"""Rows. Further keys share the row of another one, whose limits then hold for both."""
_WORD_BYTES = 8
_RUNNING = 5
"""Index in a row of the running requests of the first process, after the digest and two rates of two words."""
REQUESTS, TOKENS = 1, 3
"""Index in a row of the two rates."""


def table_bytes(processes: int) -> int:
    """Returns the size of the table of so many processes."""
    return _ROWS * (_RUNNING + processes) * _WORD_BYTES


@contextmanager
def shared_file(processes: int) -> Iterator[BinaryIO]:
    """Yields a file without a name, for the table of so many processes."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), table_bytes(processes))
        yield file


class _FileLock:
    """A lock between processes; within one process it excludes nobody."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class LimitTable:
    """The table, as one process sees it."""

    def __init__(
        self, descriptor: int = -1, process: int = 0, processes: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Opens the table; requests an earlier process of that number ran are not counted any more.

        Args:
            descriptor: The shared file; -1 for a table of this process alone.
            process: Number of this process, from 0.
            processes: Number of processes.
            clock: Returns seconds, the same in all processes.
        """
        memory = memoryview(mmap.mmap(descriptor, table_bytes(processes)))
        self._words = memory.cast("Q")
        self._reals = memory.cast("d")
        self._width = _RUNNING + processes
        self._own = _RUNNING + process
        self._locked: AbstractContextManager[object] = _FileLock(descriptor) if processes > 1 else nullcontext()
        self._clock = clock
        self._rows: dict[str, int] = {}
        with self.locked():
            for index in range(self._own, len(self._words), self._width):
                if self._words[index]:
                    self._words[index] = 0

    def locked(self) -> AbstractContextManager[object]:
        """Keeps the other processes away while the context lasts, for microseconds. A process that dies releases it."""
        return self._locked

    def row(self, name: str) -> int:
        """Returns the row of a key or tenant, which is made at its first use."""
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = self._find(name)
        return row

    def _find(self, name: str) -> int:
        digest = int.from_bytes(blake2b(name.encode(), digest_size=_WORD_BYTES).digest(), "little") or 1
        with self.locked():
            for step in range(_ROWS):
                row = (digest + step) % _ROWS * self._width
                if self._words[row] in (0, digest):
                    self._words[row] = digest
                    return row
        return digest % _ROWS * self._width

    def wait_for(self, row: int, rate: int, amount: float, per_second: float, most: float) -> float:
        """Returns the seconds until an amount fits into a rate; 0 if it fits now.

        Args:
            row: The row.
            rate: REQUESTS or TOKENS.
            amount: The amount to add; more than ``most`` fits into an unused rate.
            per_second: The permitted rate.
            most: Maximum use at once.
        """
        used = self._drained(row, rate, per_second)
        return max(0.0, used + min(amount, most) - most) / per_second

    def add(self, row: int, rate: int, amount: float, per_second: float) -> None:
        """Adds an amount to a rate, or takes it back if it is negative."""
        used = self._drained(row, rate, per_second)
        self._reals[row + rate] = max(0.0, used + amount)
        self._reals[row + rate + 1] = self._clock()

    def running(self, row: int) -> int:
        """Returns the running requests of all processes."""
        return self._words[row + self._own] if self._width == _RUNNING + 1 else sum(self._row_of_running(row))

    def _row_of_running(self, row: int) -> memoryview[int]:
        return self._words[row + _RUNNING : row + self._width]

    def begin(self, row: int, requests: int = 1) -> None:
        """Counts running requests of this process."""
        self._words[row + self._own] += requests

    def end(self, row: int, requests: int = 1) -> None:
        """Ends running requests of this process."""
        self._words[row + self._own] -= requests

    def _drained(self, row: int, rate: int, per_second: float) -> float:
        since = max(0.0, self._clock() - self._reals[row + rate + 1])
        return max(0.0, self._reals[row + rate] - since * per_second)
