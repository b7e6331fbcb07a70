"""The body of an engine's response, as it passes through to the client of a forwarded or picked request."""

from __future__ import annotations

from kvrouter.frontend.proxy.transfer_filter import TransferFilter
from kvrouter.frontend.proxy.usage import Usage, UsageReader


class EngineResponse:
    """Reads the usage of a response, and removes fields its client must not see."""

    def __init__(self, *, is_stream: bool, status: int = 200, hides_internal: bool = False) -> None:
        """Creates it.

        Args:
            is_stream: Whether it is a stream of events.
            status: Its HTTP status.
            hides_internal: Whether to remove internal fields of engines.
        """
        self.is_stream = is_stream
        """Whether it is a stream of events."""
        self._reader = UsageReader(is_stream=is_stream)
        self._transfers = TransferFilter(is_stream=is_stream, status=status) if hides_internal else None

    def take(self, piece: bytes, *, ends: bool = False) -> bytes:
        """Returns the bytes to pass on after a further piece has arrived, which may be the last.

        Raises:
            DependencyAway: an event or value is too long to be filtered.
        """
        self._reader.take(piece)
        return piece if self._transfers is None else self._transfers.take(piece, ends=ends)

    def usage(self) -> Usage | None:
        """Returns the usage the engine has reported; None if it has not."""
        return self._reader.usage()
