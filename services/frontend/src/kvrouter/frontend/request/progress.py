"""The progress of one attempt: passes its output on, and reports each change of the load and the attempt's end."""

from __future__ import annotations

import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import Protocol

import msgspec
from kvrouter.core import OutputWriter
from kvrouter.frontend.metrics import ModelMetrics
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.schedulers.booking_updates import LiveBooking
from kvrouter.frontend.schedulers.scheduler_link import SchedulerLink
from kvrouter.frontend.workers.failures import WorkerFailure
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.runtime.tracing import Kind, Span, span
from kvrouter.v1.common_pb2 import LowerTiers
from kvrouter.v1.texts import rank_text
from kvrouter.v1.worker_pb2 import FinishReason


class OutputComplete(Exception):
    """Raised by a receiver needing no further output, such as after a stop string. The request has succeeded."""


class OutputReceiver(Protocol):
    """Passes the output of one request on to its client.

    Its methods are called from the reader of the worker's connection, which also serves other requests: they must not
    block. A client that does not read must not grow memory without limit: raise ``KvRouterError`` to end its request.
    Raise ``OutputComplete`` to end it as complete.
    How the request ends, ``Generation.run`` says by returning or raising.
    """

    def routed(self, routing: Routed) -> None:
        """Receives where the request runs, at the start of each attempt."""

    def output(self, output: Output) -> OutputWriter | None:
        """Receives a piece of the output. May return a writer for further pieces that have only tokens."""


_BROKEN_OFF = (FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR)

_MAX_PIECES = 512
"""Pieces kept before ``compact`` packs their tokens."""


class KeptOutput(msgspec.Struct):
    """The output tokens of a request. Keeping a piece costs one append; many are packed at once."""

    pieces: list[Sequence[int]] = []
    """The token ids of the latest pieces, in the order in which they were appended."""
    packed_pieces: bytearray = bytearray()
    """The tokens of those before, a packed buffer."""

    def compact(self) -> None:
        """Limits the memory of the pieces. To be called now and then."""
        if len(self.pieces) > _MAX_PIECES:
            self._pack()

    def add_packed(self, tokens: bytes) -> None:
        """Adds tokens that are packed already. Packs the pieces, which come before them."""
        if self.pieces:
            self._pack()
        self.packed_pieces += tokens

    def packed(self) -> bytes:
        """Returns the tokens as a packed buffer."""
        self._pack()
        return bytes(self.packed_pieces)

    def _pack(self) -> None:
        self.packed_pieces += array("I", chain.from_iterable(self.pieces)).tobytes()
        self.pieces.clear()


class Progress(msgspec.Struct, eq=False):
    """The output of an attempt so far. ``end`` must follow."""

    booking: LiveBooking
    """The booking of the attempt."""
    link: SchedulerLink
    """Where it is booked."""
    receiver: OutputReceiver
    metrics: ModelMetrics
    """The metrics of its model."""
    since_ns: int
    """Arrival of the request, or for a continuation, failure of the worker before; by ``time.perf_counter_ns``."""
    kept: KeptOutput | None = None
    """Keeps the output; None if the request cannot migrate."""
    continues: bool = False
    """Whether the request has output of an earlier attempt."""
    handover_us: Callable[[], int | None] | None = None
    """Returns the time since a prefill worker computed the prompt, microseconds, if known. None if the worker computes
    it."""
    output_tokens: int = 0
    """Output tokens of this attempt. Those that a writer takes are added by ``written``."""
    cached_tokens: int | None = None
    """Prompt tokens the worker found cached; None while it has not said so."""
    lower_cached_tokens: LowerTiers | None = None
    """Those from below device memory; None if it has not said so."""
    first_output_ns: int = 0
    """Time of the first output, by ``time.perf_counter_ns``; 0 before."""
    last_output_ns: int = 0
    """Time of the latest of these output tokens."""
    is_whole: bool = False
    """Whether the output has ended, by itself or at its limit."""
    frees_when_prefilled: bool = False
    """Whether the first output was also the last, so the free reports the computed prompt as well."""
    counted_tokens: int = 0
    """Output tokens the metric includes."""

    def pass_on(self, output: Output) -> OutputWriter | None:
        """Passes a piece of the output on. May run for every token, so it defers most work to full blocks.

        May return a writer for the tokens that follow, of any blocks. It reports each need of a further block, and
        ``written`` counts the tokens.
        """
        tokens = output.tokens
        if tokens:
            now_ns = time.perf_counter_ns()
            if self.output_tokens:
                self.metrics.token_latency.observe((now_ns - self.last_output_ns) / 1e9, tokens)
            else:
                if output.finish_reason and self.handover_us is None:
                    self.frees_when_prefilled = True  # ``end`` follows, which says both in one update.
                else:
                    handover_us = None if self.handover_us is None else self.handover_us()
                    self.link.prefill_complete(self.booking, handover_us=handover_us)
                waited = self.metrics.migration_seconds if self.continues else self.metrics.ttft_seconds
                waited.observe((now_ns - self.since_ns) / 1e9)
                self.first_output_ns = now_ns
            self.last_output_ns = now_ns
            self.output_tokens = output_tokens = self.output_tokens + tokens
            if self.kept is not None:
                self.kept.pieces.append(output.token_ids)
                self.kept.compact()
            if output_tokens > self.booking.room and not output.finish_reason:
                self._report()
        writer = self.receiver.output(self._note_details(output) if isinstance(output, DetailedOutput) else output)
        if writer is None or output.finish_reason or not self.output_tokens:
            return None
        room = self.booking.room - self.output_tokens
        writer.begin(room, self.last_output_ns, self.metrics.token_latency, self._report)
        return writer

    def written(self, tokens: int, token_ids: bytes, last_ns: int) -> None:
        """Counts tokens that a writer has taken, and keeps their packed ids.

        ``last_ns``: time of the last one, by ``time.perf_counter_ns``.
        """
        self.output_tokens += tokens
        self.last_output_ns = last_ns
        if self.kept is not None:
            self.kept.add_packed(token_ids)

    def _note_details(self, output: DetailedOutput) -> Output:
        """Notes what a piece has besides tokens. Returns the piece for the client."""
        if output.finish_reason:
            self.is_whole = output.finish_reason not in _BROKEN_OFF
        if output.cached_tokens is None or self.cached_tokens is not None:
            return output
        self.cached_tokens, self.lower_cached_tokens = output.cached_tokens, output.lower_cached_tokens
        if self.continues:
            # The client has received what the first worker found, of the prompt that it sent.
            return output.without("cached_tokens")
        booking = self.booking
        self.metrics.found_cached(output.cached_tokens, booking.predicted_cached_tokens, booking.prompt_tokens)
        if output.lower_cached_tokens is not None:
            for tier, count in self.metrics.lower_cached_tokens.items():
                count.value += getattr(output.lower_cached_tokens, tier)
        return output

    def end(self) -> None:
        """Frees the booking."""
        self.metrics.output_tokens.value += self.output_tokens - self.counted_tokens
        self.link.free(
            self.booking,
            self.cached_tokens,
            lower_cached_tokens=self.lower_cached_tokens,
            output_tokens=self.output_tokens if self.is_whole and not self.continues else None,
            prefill_complete=self.frees_when_prefilled,
        )

    def _report(self, taken: int = 0) -> int:
        """Reports the need of a further block.

        Args:
            taken: Number of tokens that a writer has taken, and ``written`` has not counted.

        Returns:
            How many tokens fit into the blocks, with those taken.
        """
        output_tokens = self.output_tokens + taken
        self.link.report_output(self.booking, output_tokens)
        self.metrics.output_tokens.value += output_tokens - self.counted_tokens
        self.counted_tokens = output_tokens
        return self.booking.room - self.output_tokens


GENERATE = "kvrouter.v1.WorkerService/Generate"
"""Name of the span of an attempt."""


def describe_attempt(attempt_span: Span, booking: LiveBooking, endpoint: str) -> None:
    """Sets where an attempt runs, if the span is recorded."""
    if attempt_span.recording:
        attempt_span.set(
            {
                "server.address": endpoint,
                "kvrouter.rank": rank_text(booking.rank),
                "kvrouter.attempt": booking.key.attempt,
                "kvrouter.predicted_cached_tokens": booking.predicted_cached_tokens,
            }
        )


async def traced_attempt(
    running: Awaitable[WorkerFailure | None], booking: LiveBooking, endpoint: str, progress: Progress
) -> WorkerFailure | None:
    """Returns how a running attempt ended, after recording it as a span."""
    with span(GENERATE, Kind.CLIENT) as attempt_span:
        describe_attempt(attempt_span, booking, endpoint)
        failure: WorkerFailure | None = None
        try:
            failure = await running
        finally:
            attempt_span.set({"gen_ai.usage.output_tokens": progress.output_tokens})
            if progress.cached_tokens is not None:
                attempt_span.set({"kvrouter.cached_tokens": progress.cached_tokens})
            if first_ns := progress.first_output_ns:
                unix_ns = time.time_ns() - (time.perf_counter_ns() - first_ns)
                attempt_span.add_event("first_token", unix_ns)
            if failure is not None:
                attempt_span.fail(failure.cause, failure.message)
        return failure
