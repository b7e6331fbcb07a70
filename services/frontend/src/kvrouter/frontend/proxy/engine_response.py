"""The body of an engine's response, as it passes through to the client of a forwarded or picked request."""

from __future__ import annotations

from kvrouter.frontend.proxy.transfer_filter import TransferFilter
from kvrouter.frontend.proxy.usage import Usage, UsageReader, UsageRemover


class EngineResponse:
    """Reads the usage of a response, and removes fields its client must not see or did not request."""

    def __init__(
        self, *, is_stream: bool, status: int = 200, removes_usage: bool = False, hides_internal: bool = False
    ) -> None:
        """Creates it.

        Args:
            is_stream: Whether it is a stream of events.
            status: Its HTTP status.
            removes_usage: Whether to remove the usage from a stream.
            hides_internal: Whether to remove internal fields of engines.
        """
        self.is_stream = is_stream
        """Whether it is a stream of events."""
        self._reader = UsageReader(is_stream=is_stream)
        self._remover = UsageRemover() if is_stream and removes_usage else None
        self._transfers = TransferFilter(is_stream=is_stream, status=status) if hides_internal else None

    def take(self, piece: bytes, *, ends: bool = False) -> bytes:
        """Returns the bytes to pass on after a further piece has arrived, which may be the last.

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
        """Returns the usage the engine has reported; None if it has not."""
        return self._reader.usage()
