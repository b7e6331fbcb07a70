"""Decides whose fault a failed call to a worker is: the worker's, the request's, or the deadline's.

A worker's fault costs an attempt and counts against the worker. What is the request's fault would fail on every worker:
it is passed to the client and never counts against a worker, and neither does a deadline that passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import grpc
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import AllBusy, KvRouterError, WorkerLost

RETRY_AFTER_MS = 1000
"""When a client may try again after every worker was at its limit, milliseconds."""
_DEADLINE_MARGIN_SECONDS = 1.0
"""A DEADLINE_EXCEEDED is the client's own when less than this was left: gRPC's clock is not ours, and no retry could
use the rest."""


class Fault(Enum):
    """Who is at fault."""

    WORKER = "worker"
    REQUEST = "request"
    DEADLINE = "deadline"


FAULTS: Mapping[grpc.StatusCode, Fault] = {
    grpc.StatusCode.INVALID_ARGUMENT: Fault.REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: Fault.REQUEST,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.DEADLINE,
    # A cancellation by the client unwinds the call; a CANCELLED that arrives as a status is the worker's doing.
    grpc.StatusCode.CANCELLED: Fault.WORKER,
    grpc.StatusCode.UNKNOWN: Fault.WORKER,
    grpc.StatusCode.INTERNAL: Fault.WORKER,
    grpc.StatusCode.UNAVAILABLE: Fault.WORKER,
    grpc.StatusCode.ABORTED: Fault.WORKER,
    grpc.StatusCode.DATA_LOSS: Fault.WORKER,
    # The worker is full. Others may not be.
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.WORKER,
    # The worker is not what it registered as: it lacks the method, the rank, or the state to serve.
    grpc.StatusCode.UNIMPLEMENTED: Fault.WORKER,
    grpc.StatusCode.NOT_FOUND: Fault.WORKER,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.WORKER,
    # The gateway makes the ids that workers see, and no credential of a client reaches a worker.
    grpc.StatusCode.ALREADY_EXISTS: Fault.WORKER,
    grpc.StatusCode.PERMISSION_DENIED: Fault.WORKER,
    grpc.StatusCode.UNAUTHENTICATED: Fault.WORKER,
}
"""Every code that a call can fail with."""


def fault_of(error: KvRouterError, deadline: Deadline) -> Fault:
    """Returns who is at fault for a call to a worker that failed.

    Args:
        error: What the call failed with.
        deadline: The deadline that the call was made with.
    """
    if error.info.retry_elsewhere:
        return Fault.WORKER
    fault = FAULTS.get(error.code, Fault.WORKER)
    if fault is Fault.DEADLINE:
        left = deadline.remaining()
        if left is None or left > _DEADLINE_MARGIN_SECONDS:
            return Fault.WORKER  # It gave up on its own, long before the client would have.
    return fault


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What an attempt at a request failed with, through its worker."""

    worker_id: int
    cause: str
    """As metrics have it: a gRPC code, ``malformed``, ``unfinished``, ``error`` or ``silent``."""
    message: str
    """What happened, for a person."""

    @property
    def is_silent(self) -> bool:
        """Whether the worker was left because it stopped answering. It may serve the request yet."""
        return self.cause == "silent"

    def as_error(self, why_final: str = "", *, has_output: bool = False) -> KvRouterError:
        """Returns the error that the client gets when no further attempt is made."""
        message = f"{self.message}; {why_final}" if why_final else self.message
        if self.cause == grpc.StatusCode.RESOURCE_EXHAUSTED.name and not has_output:
            return AllBusy(RETRY_AFTER_MS, message)
        return WorkerLost(self.worker_id, message)


class AttemptFailed(Exception):
    """An attempt at a request failed through its worker. The request may be retried elsewhere if it has no output."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure
        """What to keep of it: the exception itself would keep the request, by the frames of its traceback."""
