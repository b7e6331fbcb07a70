"""What is known about one replayed request once it has ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse


@dataclass(slots=True)
class RequestRecord:
    """One request of a run; filled from the pieces of its answer."""

    index: int
    """Position in the trace."""
    due_engine_s: float
    """When it was due, engine seconds after the start of the run."""
    prompt_tokens: int
    """Tokens of the prompt."""
    late_wall_ms: float = 0.0
    """How much later than due it was sent, wall milliseconds."""
    ended_engine_s: float | None = None
    """When its answer ended, engine seconds after the start of the run by the client's clock; None while it runs."""
    error: str | None = None
    """Name of the status code that ended it; None where it succeeded."""
    error_message: str = ""
    """What the error said."""
    cached_tokens: int | None = None
    """Prompt tokens that the worker says it had cached; None where it never said."""
    ttft_ms: float | None = None
    """Time to the first token from arrival in the engine, or at the Scheduler where that held it, engine milliseconds;
    None where no token came."""
    itl_ms: list[float] = field(default_factory=list)
    """Times between one token and the next, engine milliseconds."""
    output_tokens: int = 0
    """Tokens generated."""
    worker: tuple[int, int] | None = None
    """The rank that ran it last: (worker id, data parallel rank)."""
    router_ms: float | None = None
    """What the router added before the dispatch, without the time that it held the request, wall milliseconds."""
    predicted_overlap_blocks: int | None = None
    """Leading blocks that the rank was predicted to hold."""
    attempts: int = 1
    """Tries that it took."""
    preemptions: int = 0
    """Times that the engine preempted it."""
    clock: float = 1.0
    """Engine seconds in one second of the wall."""
    _queued_ms: float = 0.0
    _last_token_ns: int | None = None

    @property
    def completed(self) -> bool:
        """Whether it ended without an error."""
        return self.ended_engine_s is not None and self.error is None

    def take(self, piece: FrontendServiceGenerateResponse) -> None:
        """Adds a piece of the answer."""
        if piece.HasField("routing"):
            routing = piece.routing
            self.worker = (routing.rank.worker_id, routing.rank.dp_rank)
            self.router_ms = (routing.router_us - routing.queued_us) / 1000
            self._queued_ms = routing.queued_us / 1000 * self.clock
            self.predicted_overlap_blocks = routing.predicted_overlap_blocks
            self.attempts = routing.attempt + 1
        output = piece.output
        if output.HasField("cached_tokens"):
            self.cached_tokens = output.cached_tokens
        self.preemptions = max(self.preemptions, output.preemptions)
        self._take_stamps(
            output.token_engine_ns, output.arrived_engine_ns if output.HasField("arrived_engine_ns") else None
        )

    def _take_stamps(self, stamps: Iterable[int], arrived_ns: int | None) -> None:
        for stamp in stamps:
            if self._last_token_ns is not None:
                self.itl_ms.append((stamp - self._last_token_ns) / 1e6)
            elif arrived_ns is not None:
                self.ttft_ms = (stamp - arrived_ns) / 1e6 + self._queued_ms
            self._last_token_ns = stamp
            self.output_tokens += 1
