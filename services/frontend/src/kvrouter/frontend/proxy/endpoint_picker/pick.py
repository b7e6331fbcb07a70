"""A rank picked for a request, and the progress of the request there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.frontend.model_metrics import ModelMetrics
from kvrouter.frontend.proxy.endpoint_picker.engine_watch import EngineWatch
from kvrouter.frontend.proxy.event_reader import count_tokens
from kvrouter.frontend.schedulers.live_bookings import LiveBooking
from kvrouter.frontend.schedulers.session_link import SchedulerLink
from kvrouter.v1.frontend_pb2 import RoutedOn


class Pick:
    """A booking. ``end`` must follow; further calls have no effect."""

    def __init__(
        self,
        booking: LiveBooking,
        link: SchedulerLink,
        endpoints: Sequence[str],
        headers: Mapping[str, str],
        engine: EngineWatch,
        *,
        metrics: ModelMetrics,
        overlap_blocks: int,
        routed_on: RoutedOn,
    ) -> None:
        self.booking = booking
        self.endpoints = endpoints
        """The chosen endpoint, then fallbacks, as host:port."""
        self.headers = headers
        """Headers for the engine, such as the rank it shall use."""
        self.routed_on = routed_on
        """The decision's knowledge of the prompt."""
        self.engine = engine
        """The engine, which may die of the request."""
        self.overlap_blocks = overlap_blocks
        """Predicted overlap: leading blocks of the prompt the rank has in device memory."""
        self.output_tokens = 0
        """Number of output tokens so far, as far as it can be seen: one for each event, and one for other responses."""
        self._metrics = metrics
        self._link = link
        self._ended = False

    def responded(self, piece: bytes, *, is_stream: bool) -> None:
        """Accounts for a piece of the response: the first one ends the prefill, each event of a stream is a token."""
        if self._ended or not piece:
            return
        if not self.output_tokens:
            self._link.prefill_complete(self.booking)
            self.engine.responded()
        self.output_tokens += count_tokens(piece) if is_stream else 1
        if is_stream:
            self._link.report_output(self.booking, self.output_tokens)

    def end(self, cached_tokens: int | None = None) -> None:
        """Frees the booking.

        Args:
            cached_tokens: Prompt tokens the engine found in its cache; None if it did not report them.
        """
        if self._ended:
            return
        self._ended = True
        self.engine.end()
        self._link.free(self.booking, cached_tokens)
        if cached_tokens is not None:
            self._metrics.cached_tokens.inc(cached_tokens)
            self._metrics.predicted_cached_tokens.inc(self.booking.predicted_cached_tokens)
            self._metrics.prompt_tokens.inc(self.booking.prompt_tokens)
