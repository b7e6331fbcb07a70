"""Responses of which parts have arrived, by the number of their calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrouter.net.calls.limits import ITEM_BYTES


@dataclass(slots=True)
class _Parts:
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class UnfinishedResponses:
    """Keeps the parts of responses. Its caller bounds their size."""

    def __init__(self) -> None:
        """Starts without parts."""
        self.bytes = 0
        """Memory of all parts."""
        self.by_number: dict[int, _Parts] = {}
        """The parts of each response, by the number of its call."""

    def add(self, number: int, part: bytes) -> int:
        """Adds a part. Returns the memory of all parts of its response, bytes."""
        parts = self.by_number.setdefault(number, _Parts())
        parts.parts.append(part)
        size = max(len(part), ITEM_BYTES)
        parts.size += size
        self.bytes += size
        return parts.size

    def remove(self, number: int) -> list[bytes]:
        """Removes the parts of a response, and returns them in order."""
        parts = self.by_number.pop(number, None)
        if parts is None:
            return []
        self.bytes -= parts.size
        return parts.parts
