"""The body of an engine's response, as it passes through the picker."""

from __future__ import annotations

from kvrouter.frontend.api.openai.reported_usage import Usage, UsageReader
from kvrouter.frontend.api.openai.stream_usage import UsageRemover


class EngineResponse:
    """Reads the usage of a response, and removes it from a stream whose client did not request it."""

    def __init__(self, *, is_stream: bool, removes_usage: bool) -> None:
        self.is_stream = is_stream
        """Whether it is a stream of events."""
        self._reader = UsageReader(is_stream=is_stream)
        self._remover = UsageRemover() if is_stream and removes_usage else None

    def take(self, piece: bytes, *, ends: bool) -> bytes:
        """Returns what to pass on after a further piece has arrived, which may be the last."""
        self._reader.take(piece)
        if self._remover is None:
            return piece
        passed = self._remover.remove(piece)
        return passed + self._remover.rest() if ends else passed

    def usage(self) -> Usage | None:
        """Returns what the engine has reported; None if it has not."""
        return self._reader.usage()
