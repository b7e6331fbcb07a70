"""A rank picked for a request, and the progress of the request there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvrouter.frontend.metrics import ModelMetrics
from kvrouter.frontend.proxy.endpoint_picker.engine_watch import EngineWatch
from kvrouter.frontend.proxy.engine_response import count_tokens
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.session_link import SchedulerLink
from kvrouter.v1.frontend_pb2 import RoutedOn


@dataclass(slots=True, eq=False)
class Pick:
    """A booking. ``end`` must follow; further calls have no effect."""

    booking: LiveBooking
    link: SchedulerLink
    """The Scheduler that made it."""
    endpoints: Sequence[str]
    """The chosen endpoint, then fallbacks, as host:port."""
    headers: Mapping[str, str]
    """Headers for the engine, such as the rank it shall use."""
    engine: EngineWatch
    """The engine, which may die of the request."""
    metrics: ModelMetrics
    """Metrics of the model."""
    overlap_blocks: int
    """Predicted overlap: leading blocks of the prompt the rank has in device memory."""
    routed_on: RoutedOn
    """The decision's knowledge of the prompt."""
    output_tokens: int = 0
    """Number of output tokens so far, as far as it can be seen: one for each event, and one for other responses."""
    has_ended: bool = False

    def responded(self, piece: bytes, *, is_stream: bool) -> None:
        """Accounts for a piece of the response: the first one ends the prefill, each event of a stream is a token."""
        if self.has_ended or not piece:
            return
        if not self.output_tokens:
            self.link.prefill_complete(self.booking)
            self.engine.responded()
        self.output_tokens += count_tokens(piece) if is_stream else 1
        if is_stream:
            self.link.report_output(self.booking, self.output_tokens)

    def end(self, cached_tokens: int | None = None) -> None:
        """Frees the booking.

        Args:
            cached_tokens: Prompt tokens the engine found in its cache; None if it did not report them.
        """
        if self.has_ended:
            return
        self.has_ended = True
        self.engine.end()
        self.link.free(self.booking, cached_tokens)
        if cached_tokens is not None:
            self.metrics.cached_tokens.inc(cached_tokens)
            self.metrics.predicted_cached_tokens.inc(self.booking.predicted_cached_tokens)
            self.metrics.prompt_tokens.inc(self.booking.prompt_tokens)
