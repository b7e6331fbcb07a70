"""The body of an engine's response, as it passes through the picker."""

from __future__ import annotations

from kvrouter.frontend.api.openai.reported_usage import Usage, UsageReader
from kvrouter.frontend.api.openai.stream_usage import UsageRemover
from kvrouter.frontend.api.openai.transfer_filter import TransferFilter


class EngineResponse:
    """Reads the usage of a response, and removes what its client must not see or did not request."""

    def __init__(self, *, is_stream: bool, removes_usage: bool, transfers: TransferFilter | None = None) -> None:
        """Creates it.

        Args:
            is_stream: Whether it is a stream of events.
            removes_usage: Whether to remove the usage from a stream.
            transfers: Removes internal fields; None to pass them on.
        """
        self.is_stream = is_stream
        """Whether it is a stream of events."""
        self._reader = UsageReader(is_stream=is_stream)
        self._remover = UsageRemover() if is_stream and removes_usage else None
        self._transfers = transfers

    def take(self, piece: bytes, *, ends: bool) -> bytes:
        """Returns what to pass on after a further piece has arrived, which may be the last.

        Raises:
            DependencyAway: an event or value is too long to be filtered.
        """
        self._reader.take(piece)
        if self._transfers is not None:
            piece = self._transfers.take(piece, ends=ends)
        if self._remover is None:
            return piece
        passed = self._remover.remove(piece)
        return passed + self._remover.rest() if ends else passed

    def usage(self) -> Usage | None:
        """Returns what the engine has reported; None if it has not."""
        return self._reader.usage()
