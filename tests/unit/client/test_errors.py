"""A client raises the errors of the contract, and its own if gRPC has no answer of a Frontend."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from kvrouter.client import NotConnected, NotFound, TooLarge
from kvrouter.client.errors import error_of_rpc
from kvrouter.v1.error_encoding import STATUS_KEY, error_status
from kvrouter.v1.errors import AllBusy, DependencyAway, KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason


def failed(code: grpc.StatusCode, message: str, error: KvRouterError | None = None) -> grpc.aio.AioRpcError:
    details = () if error is None else ((STATUS_KEY, error_status(error).SerializeToString()),)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*details), message)


def test_an_error_of_a_frontend_has_all_details() -> None:
    sent = AllBusy(1500)
    error = error_of_rpc(failed(sent.code, str(sent), sent))
    assert isinstance(error, AllBusy)
    assert (error.message, error.code, error.retry_after) == (
        sent.message,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        1.5,
    )
    assert error.advice == "Retry after the given time."
    assert str(error) == f"{sent.message}. {error.advice}"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, NotConnected),
        (grpc.StatusCode.NOT_FOUND, NotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TooLarge),
        (grpc.StatusCode.UNKNOWN, KvRouterError),
    ],
)
def test_errors_without_details_have_a_class_of_their_code(code: grpc.StatusCode, kind: type[KvRouterError]) -> None:
    assert type(error_of_rpc(failed(code, "m"))) is kind


def test_a_lost_connection_may_be_tried_again_at_once() -> None:
    error = error_of_rpc(failed(grpc.StatusCode.UNAVAILABLE, "m"))
    assert (error.retry_after, error.retry_elsewhere) == (0, True)


def test_a_frontend_that_is_away_from_etcd_is_connected() -> None:
    sent = DependencyAway("no etcd")
    error = error_of_rpc(failed(sent.code, str(sent), sent))
    assert type(error) is DependencyAway
    assert error.info.reason == ErrorReason.ERROR_REASON_DEPENDENCY_AWAY
