"""The client's errors are those of the services."""

from __future__ import annotations

import pickle

import grpc
import pytest
from kvrouter.client import AllBusy, KvRouterError, NotConnected, NotFound, TooLarge
from kvrouter.client import errors as client_errors
from kvrouter.client.errors import error_of
from kvrouter.runtime import errors as service_errors
from kvrouter.runtime.errors import to_parts
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

CODES = {code.value[0]: code for code in grpc.StatusCode}


@pytest.mark.parametrize("reason", ErrorReason.keys()[1:])
def test_every_reason_has_the_class_of_the_same_name(reason: str) -> None:
    (kind,) = (
        each
        for each in vars(service_errors).values()
        if isinstance(each, type) and getattr(each, "reason", None) == ErrorReason.Value(reason)
    )
    error = error_of(kind.status, "m", ErrorInfo(reason=ErrorReason.Value(reason)))
    assert type(error) is getattr(client_errors, kind.__name__)
    assert error.reason == reason.removeprefix("ERROR_REASON_")


def test_an_error_has_all_details() -> None:
    code, message, info = to_parts(service_errors.AllBusy(1500))
    error = error_of(CODES[code], message, info)
    assert isinstance(error, AllBusy)
    assert (error.message, error.code, error.retry_after) == (message, grpc.StatusCode.RESOURCE_EXHAUSTED, 1.5)
    assert error.advice == "Retry after the given time."
    assert str(error) == f"{message}. {error.advice}"
    assert vars(error_of(CODES[code], str(error), info)) == vars(error), "a message that has the advice already"
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own
    assert (type(copy), vars(copy)) == (AllBusy, vars(error))


def test_errors_without_details_have_a_class_of_their_code() -> None:
    assert type(error_of(grpc.StatusCode.UNAVAILABLE, "m", None)) is NotConnected
    assert type(error_of(grpc.StatusCode.NOT_FOUND, "m", ErrorInfo())) is NotFound
    assert type(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "m", None)) is TooLarge
    assert type(error_of(grpc.StatusCode.UNKNOWN, "m", None)) is KvRouterError


def test_a_reason_that_is_newer_than_the_client_is_kept_as_its_number() -> None:
    error = error_of(grpc.StatusCode.UNAVAILABLE, "m", ErrorInfo.FromString(b"\x08\xe7\x07"))
    assert (type(error), error.reason) == (KvRouterError, "999")
