"""The progress of one attempt: passes its output on, and reports to the Scheduler what changes the load."""

from __future__ import annotations

import time

from kvrouter.frontend.lifecycle.output_receiver import OutputReceiver
from kvrouter.frontend.model_metrics import ModelMetrics
from kvrouter.frontend.scheduler_client.live_bookings import LiveBooking
from kvrouter.frontend.scheduler_client.session_link import SchedulerLink
from kvrouter.v1.worker_pb2 import GenerateOutput


class Progress:
    """What an attempt has output so far. ``end`` must follow."""

    def __init__(
        self,
        booking: LiveBooking,
        link: SchedulerLink,
        receiver: OutputReceiver,
        metrics: ModelMetrics,
        arrived_ns: int,
    ) -> None:
        """``arrived_ns`` is the arrival of the request by ``time.perf_counter_ns``, ``metrics`` those of its model."""
        self.output_tokens = 0
        self._cached_tokens: int | None = None
        self._booking = booking
        self._link = link
        self._receiver = receiver
        self._metrics = metrics
        self._arrived_ns = arrived_ns
        self._last_output_ns = 0
        self._counted_tokens = 0
        """Output tokens that the metric includes."""
        self._room = -booking.prompt_tokens % booking.block_size
        """Output tokens that fit into the blocks that are booked."""

    def pass_on(self, encoded: bytes, output: GenerateOutput) -> None:
        """Passes a piece of the output on. Runs for every token, so it defers what can wait for a full block."""
        tokens = len(output.token_ids)
        if tokens:
            now_ns = time.perf_counter_ns()
            if self.output_tokens:
                self._metrics.token_latency.observe((now_ns - self._last_output_ns) / 1e9, tokens)
            else:
                self._link.prefill_complete(self._booking)
                self._metrics.ttft_seconds.observe((now_ns - self._arrived_ns) / 1e9)
            self._last_output_ns = now_ns
            self.output_tokens += tokens
            if self.output_tokens > self._room:
                self._report()
        if self._cached_tokens is None and output.HasField("cached_tokens"):
            self._cached_tokens = output.cached_tokens
            self._metrics.cached_tokens.inc(output.cached_tokens)
            self._metrics.predicted_cached_tokens.inc(self._booking.predicted_cached_tokens)
            self._metrics.prompt_tokens.inc(self._booking.prompt_tokens)
        self._receiver.output(encoded, output)

    def end(self) -> None:
        """Frees the booking."""
        self._count()
        self._link.free(self._booking, self._cached_tokens)

    def _report(self) -> None:
        """Reports that the request needs a further block."""
        booking = self._booking
        self._link.report_output(booking, self.output_tokens)
        self._room = self.output_tokens + -(booking.prompt_tokens + self.output_tokens) % booking.block_size
        self._count()

    def _count(self) -> None:
        self._metrics.output_tokens.inc(self.output_tokens - self._counted_tokens)
        self._counted_tokens = self.output_tokens
