"""The record of one replayed request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse


@dataclass(slots=True)
class RequestRecord:
    """One request of a run, filled from the pieces of its response."""

    index: int
    """Position in the trace."""
    due_engine_s: float
    """When it was due, engine seconds after the start of the run."""
    prompt_tokens: int
    """Tokens of the prompt."""
    late_wall_ms: float = 0.0
    """How late it was sent, wall milliseconds."""
    ended_engine_s: float | None = None
    """When its response ended by the client's clock, engine seconds after the start of the run; None while it runs."""
    error: str | None = None
    """Name of the status code, or kind, of its failure; None if it succeeded."""
    error_message: str = ""
    """Message of its failure."""
    cached_tokens: int | None = None
    """Prompt tokens that the worker found in its cache; None if the worker did not report it."""
    host_tokens: int = 0
    """Those of them that it loaded from host memory."""
    shared_tokens: int = 0
    """Those of them that it loaded from shared storage."""
    ttft_ms: float | None = None
    """Time to the first token, engine milliseconds, from the arrival in the engine, or at the Scheduler if that queued
    the request. None without a token."""
    itl_ms: list[float] = field(default_factory=list)
    """Times between consecutive tokens, engine milliseconds."""
    output_tokens: int = 0
    """Number of output tokens."""
    worker: tuple[int, int] | None = None
    """The rank of the last attempt: (worker id, data-parallel rank)."""
    router_ms: float | None = None
    """Time that the router added before the dispatch, without queueing, wall milliseconds."""
    predicted_overlap_blocks: int | None = None
    """Predicted overlap, blocks."""
    attempts: int = 1
    """Number of attempts."""
    preemptions: int = 0
    """Number of preemptions in the engine."""
    clock: float = 1.0
    """Engine seconds in one wall second."""
    _queued_ms: float = 0.0
    _last_token_ns: int | None = None
    _last_arrival_ms: float | None = None

    @property
    def completed(self) -> bool:
        """Whether it ended without an error."""
        return self.ended_engine_s is not None and self.error is None

    def fail(self, code: str, message: str) -> None:
        """Records a failure."""
        self.error, self.error_message = code, message

    def take_tokens(self, since_sent_s: float, count: int) -> None:
        """Adds output tokens of a server that reports no times of its own.

        Args:
            since_sent_s: Wall seconds since the request was sent.
            count: Number of tokens; several that arrive together are spread evenly since the last ones.
        """
        at_ms = since_sent_s * 1000 * self.clock
        if self._last_arrival_ms is None:
            self.ttft_ms = at_ms
        else:
            self.itl_ms += [(at_ms - self._last_arrival_ms) / count] * count
        self._last_arrival_ms = at_ms
        self.output_tokens += count

    def take(self, piece: FrontendServiceGenerateResponse) -> None:
        """Adds a piece of the response."""
        if "routing" in piece:
            routing = piece.routing
            self.worker = (routing.rank.worker_id, routing.rank.dp_rank)
            self.router_ms = (routing.router_us - routing.queued_us) / 1000
            self._queued_ms = routing.queued_us / 1000 * self.clock
            self.predicted_overlap_blocks = routing.predicted_overlap_blocks
            self.attempts = routing.attempt + 1
        output = piece.output
        if "cached_tokens" in output:
            self.cached_tokens = output.cached_tokens
            self.host_tokens = output.lower_cached_tokens.host
            self.shared_tokens = output.lower_cached_tokens.shared
        self.preemptions = max(self.preemptions, output.preemptions)
        self._take_stamps(output.token_engine_ns, output.arrived_engine_ns if "arrived_engine_ns" in output else None)

    def _take_stamps(self, stamps: Iterable[int], arrived_ns: int | None) -> None:
        for stamp in stamps:
            if self._last_token_ns is not None:
                self.itl_ms.append((stamp - self._last_token_ns) / 1e6)
            elif arrived_ns is not None:
                self.ttft_ms = (stamp - arrived_ns) / 1e6 + self._queued_ms
            self._last_token_ns = stamp
            self.output_tokens += 1
