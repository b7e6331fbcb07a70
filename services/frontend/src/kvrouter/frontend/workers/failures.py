"""Classifies failed calls to workers by fault: the worker's, the request's, or the deadline's.

A worker's fault costs an attempt and counts against the worker. A request's fault would occur on every worker: it is
passed to the client and does not count against the worker. An expired deadline does not count either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

import grpc
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import AllBusy, KvRouterError, WorkerLost

MAX_WATCHERS = 4096
"""Maximum number of requests that learn of the death of a worker which they left; further ones do not."""


class WorkerFate:
    """The fate of one worker process."""

    __slots__ = ("_on_death", "died", "is_known", "since", "worker")

    def __init__(self, worker: str, since: float, *, died: bool = False) -> None:
        """Creates a fate known if the worker has died.

        Args:
            worker: Identifies the process: its address, a space, and its mark among those at that address.
            since: Time at which requests began to leave it, seconds.
            died: Whether it has died.
        """
        self.worker = worker
        self.since = since
        self.is_known = died
        """Whether it has died or recovered."""
        self.died = died
        self._on_death: list[Callable[[str], None]] = []

    @property
    def endpoint(self) -> str:
        """Address of the process."""
        return self.worker.rpartition(" ")[0]

    @property
    def watchers(self) -> int:
        """Number of requests waiting for it to become known."""
        return len(self._on_death)

    def on_death(self, tell: Callable[[str], None]) -> None:
        """Calls a function with the worker if it dies, at once if it has died."""
        if self.died:
            tell(self.worker)
        elif not self.is_known and len(self._on_death) < MAX_WATCHERS:
            self._on_death.append(tell)

    def resolve(self, *, died: bool) -> None:
        """Records that the worker has died or recovered. Has no effect once that is known."""
        if self.is_known:
            return
        self.is_known, self.died = True, died
        watchers, self._on_death = self._on_death, []
        if died:
            for tell in watchers:
                tell(self.worker)


RETRY_AFTER_MS = 1000
"""Retry delay clients receive when every worker was at its limit, milliseconds."""
_DEADLINE_MARGIN_SECONDS = 1.0
"""If less than this was left, a DEADLINE_EXCEEDED counts as the client's own deadline: gRPC's clock may differ, and a
retry could not use the rest. Otherwise the worker gave up early."""


class Fault(Enum):
    """The cause of a failed call."""

    WORKER = "worker"
    REQUEST = "request"
    DEADLINE = "deadline"


FAULTS: Mapping[grpc.StatusCode, Fault] = {
    grpc.StatusCode.INVALID_ARGUMENT: Fault.REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: Fault.REQUEST,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.DEADLINE,
    # A client's cancellation cancels the call itself. A CANCELLED status comes from the worker.
    grpc.StatusCode.CANCELLED: Fault.WORKER,
    grpc.StatusCode.UNKNOWN: Fault.WORKER,
    grpc.StatusCode.INTERNAL: Fault.WORKER,
    grpc.StatusCode.UNAVAILABLE: Fault.WORKER,
    grpc.StatusCode.ABORTED: Fault.WORKER,
    grpc.StatusCode.DATA_LOSS: Fault.WORKER,
    # The worker is full. Others may have room.
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.WORKER,
    # The worker does not match its registration: it lacks the method, the rank, or the state to serve.
    grpc.StatusCode.UNIMPLEMENTED: Fault.WORKER,
    grpc.StatusCode.NOT_FOUND: Fault.WORKER,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.WORKER,
    # The Frontend chooses the ids that workers receive, and passes no client credentials to workers.
    grpc.StatusCode.ALREADY_EXISTS: Fault.WORKER,
    grpc.StatusCode.PERMISSION_DENIED: Fault.WORKER,
    grpc.StatusCode.UNAUTHENTICATED: Fault.WORKER,
}
"""Fault by status code, for every code a call can fail with."""


def fault_of(error: KvRouterError, deadline: Deadline) -> Fault:
    """Returns the fault of a failed call to a worker.

    Args:
        error: The error of the call.
        deadline: The deadline of the call.
    """
    if error.info.retry_elsewhere:
        return Fault.WORKER
    fault = FAULTS.get(error.code, Fault.WORKER)
    if fault is Fault.DEADLINE:
        left = deadline.remaining()
        if left is None or left > _DEADLINE_MARGIN_SECONDS:
            return Fault.WORKER
    return fault


_WITHOUT_ANSWER = frozenset({"silent", "stalled", "lost", grpc.StatusCode.UNAVAILABLE.name})
HANGS = frozenset({"silent", "stalled"})
"""Causes of leaving a worker that may hang for good."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Failure of an attempt that is its worker's fault."""

    worker_id: int
    cause: str
    """Label for metrics: a gRPC code, ``malformed``, ``unfinished``, ``error``, ``silent``, ``stalled``, ``lost`` or
    ``drained``."""
    message: str
    """The failure, for logs and errors."""
    outcome_unknown: bool = False
    """Whether the worker may still run the request, so it must be aborted before it is retried."""
    not_taken: bool = False
    """Whether the worker has not taken the request: it cannot be connected to, or is stopping."""
    fate: WorkerFate | None = None
    """The worker's fate; None if it does not matter, as for one that was draining or only full."""

    @property
    def is_silent(self) -> bool:
        """Whether the worker was left because it stopped answering. It may still serve a later attempt."""
        return self.cause == "silent"

    @property
    def never_began(self) -> bool:
        """Whether the worker has computed nothing of the request: it has not got it, or had no room for it."""
        return self.not_taken or self.cause == grpc.StatusCode.RESOURCE_EXHAUSTED.name

    @property
    def is_drained(self) -> bool:
        """Whether the worker was left because an operator drains it."""
        return self.cause == "drained"

    @property
    def may_still_run(self) -> bool:
        """Whether the worker may run the request to its end, since it may not have learned it was left."""
        return self.outcome_unknown or self.cause in _WITHOUT_ANSWER

    def as_error(self, why_final: str = "", *, has_output: bool = False) -> KvRouterError:
        """Returns the error for the client if no further attempt is made."""
        message = f"{self.message}; {why_final}" if why_final else self.message
        if self.cause == grpc.StatusCode.RESOURCE_EXHAUSTED.name and not has_output:
            return AllBusy(RETRY_AFTER_MS, message)
        return WorkerLost(self.worker_id, message)
