"""A memory bound that several indexes share."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Charged(Protocol):
    """Something whose memory counts against a budget."""

    charged_bytes: int


class MemoryBudget:
    """See ``kvrouter.core.interface.MemoryBudget``."""

    def __init__(self, max_bytes: int = 0) -> None:
        if max_bytes < 0:
            raise ValueError("bounds are 0 (none) or more")
        self.max_bytes = max_bytes
        self._indexes: WeakSet[Charged] = WeakSet()

    @property
    def used_bytes(self) -> int:
        """Memory of all indexes, as of their last changes."""
        return sum(index.charged_bytes for index in list(self._indexes))

    def add(self, index: Charged) -> None:
        """Counts the memory of an index for as long as it lives."""
        self._indexes.add(index)
