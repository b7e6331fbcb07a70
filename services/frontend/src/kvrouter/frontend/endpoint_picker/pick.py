"""A rank that was picked for a request, and the progress of the request there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.scheduler_client.session_link import SchedulerLink

_EVENT = b"data:"


class Pick:
    """A booking. ``end`` must follow; further calls have no effect."""

    def __init__(
        self,
        booking: LiveBooking,
        link: SchedulerLink,
        endpoints: Sequence[str],
        headers: Mapping[str, str],
        *,
        routed_on_load: bool,
    ) -> None:
        self.booking = booking
        self.endpoints = endpoints
        """The chosen endpoint, then fallbacks, as host:port."""
        self.headers = headers
        """Headers for the engine, such as the rank that it shall use."""
        self.routed_on_load = routed_on_load
        """Whether the prompt could not be tokenized, so that no prefix was found."""
        self._link = link
        self._output_tokens = 0
        self._ended = False

    def responded(self, piece: bytes, *, is_stream: bool) -> None:
        """Accounts for a piece of the response: the first one ends the prefill, each event of a stream is a token."""
        if self._ended or not piece:
            return
        if not self._output_tokens:
            self._link.prefill_complete(self.booking)
        self._output_tokens += max(1, piece.count(_EVENT)) if is_stream else 1
        if is_stream:
            self._link.report_output(self.booking, self._output_tokens)

    def end(self) -> None:
        """Frees the booking."""
        if not self._ended:
            self._ended = True
            self._link.free(self.booking, None)
