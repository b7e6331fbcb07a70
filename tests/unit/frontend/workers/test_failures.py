"""Whose fault a failed call to a worker is."""

from __future__ import annotations

import grpc
import pytest
from kvrouter.frontend.workers.failures import FAULTS, Fault, WorkerFailure, fault_of
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.error_encoding import from_parts
from kvrouter.v1.errors import AllBusy, Draining, KvRouterError, WorkerLost
from kvrouter.v1.errors_pb2 import ErrorInfo


def failed_with(code: grpc.StatusCode) -> KvRouterError:
    return from_parts(code.value[0], "no")


def test_every_code_that_a_call_can_fail_with_is_in_the_table() -> None:
    assert set(FAULTS) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE])
def test_an_error_that_any_worker_would_return_is_the_requests_fault(code: grpc.StatusCode) -> None:
    assert fault_of(failed_with(code), Deadline.never()) is Fault.REQUEST


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    ],
)
def test_an_error_that_another_worker_may_not_return_is_the_workers_fault(code: grpc.StatusCode) -> None:
    assert fault_of(failed_with(code), Deadline.never()) is Fault.WORKER


def test_a_typed_refusal_that_requests_another_worker_is_retried() -> None:
    refusal = from_parts(grpc.StatusCode.INVALID_ARGUMENT.value[0], "no", ErrorInfo(retry_elsewhere=True))
    assert fault_of(refusal, Deadline.never()) is Fault.WORKER
    assert fault_of(Draining(), Deadline.never()) is Fault.WORKER


def test_a_deadline_is_the_clients_only_when_it_has_come() -> None:
    error = failed_with(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert fault_of(error, Deadline.after(0)) is Fault.DEADLINE
    assert fault_of(error, Deadline.after(60)) is Fault.WORKER
    assert fault_of(error, Deadline.never()) is Fault.WORKER


def test_a_final_failure_names_its_cause_and_why_no_attempt_follows() -> None:
    failed = WorkerFailure(7, "INTERNAL", "worker 7 failed with INTERNAL: boom")
    error = failed.as_error("no other worker is eligible for the request")
    assert isinstance(error, WorkerLost)
    assert error.message == "worker 7 failed with INTERNAL: boom; no other worker is eligible for the request"


def test_a_worker_at_its_limit_is_load_for_the_client_unless_output_was_lost() -> None:
    failed = WorkerFailure(7, "RESOURCE_EXHAUSTED", "worker 7 failed with RESOURCE_EXHAUSTED: full")
    assert isinstance(failed.as_error(), AllBusy)
    assert isinstance(failed.as_error(has_output=True), WorkerLost)
