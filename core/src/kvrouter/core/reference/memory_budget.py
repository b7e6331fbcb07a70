"""A shared memory bound of several indexes."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Charged(Protocol):
    """An index whose memory counts against a budget."""

    charged_bytes: int


class MemoryBudget:
    """Implements ``kvrouter.core.interface.MemoryBudget``."""

    def __init__(self, max_bytes: int = 0) -> None:
        if max_bytes < 0:
            raise ValueError(f"expected a bound of 0 (none) or more, received {max_bytes}")
        self.max_bytes = max_bytes
        self._indexes: WeakSet[Charged] = WeakSet()

    @property
    def used_bytes(self) -> int:
        """Returns the memory of all indexes as of their last changes, in bytes."""
        return sum(index.charged_bytes for index in list(self._indexes))

    def add(self, index: Charged) -> None:
        """Counts the memory of an index while the index exists."""
        self._indexes.add(index)
