"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until one of the stop strings occurs. Text that may begin a stop string waits for more."""

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """``include`` says whether the text passed on ends with the stop string."""
        self._stop = tuple(stop)
        self._include = include
        self._waiting = ""
        self.matched: str | None = None
        """The stop string that occurred."""

    def feed(self, text: str) -> str:
        """Returns the text that can be passed on. After a match there is no more."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._waiting += text
        first = min(
            ((place, -len(stop), stop) for stop in self._stop if (place := self._waiting.find(stop)) >= 0), default=None
        )
        if first is not None:
            place, _, self.matched = first
            passed = self._waiting[: place + len(self.matched) if self._include else place]
            self._waiting = ""
            return passed
        keep = self._may_begin()
        passed, self._waiting = self._waiting[: len(self._waiting) - keep], self._waiting[len(self._waiting) - keep :]
        return passed

    def end(self) -> str:
        """Returns the text that waited, since nothing follows."""
        waiting, self._waiting = self._waiting, ""
        return waiting

    def _may_begin(self) -> int:
        """Returns the length of the longest end of the text that is the begin of a stop string."""
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(self._waiting)), 0, -1):
            end = self._waiting[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
