"""Errors come out of a stub as they went into the server."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2
from kvrouter.runtime import errors
from kvrouter.runtime.rpc import remote
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.worker_pb2 import AbortRequest, WorkerServiceGenerateRequest

from .rpc_harness import WORKER, Worker, serving, soon

TYPED_ERRORS: list[errors.KvRouterError] = [
    errors.BadRequest("bad", field="a.b", advice="Do this."),
    errors.UnknownModel("m", ["x", "y"]),
    errors.BlockSizeMismatch(32, 16),
    errors.PromptTooLong(11, 10),
    errors.UnknownWorker(7, [1, 2]),
    errors.NoWorkers("none"),
    errors.AllBusy(250),
    errors.NotReady("restoring"),
    errors.WorkerLost(3, "gone"),
    errors.PoisonPrompt("two workers died"),
    errors.RequestIdReused("r"),
    errors.SessionLost("s"),
    errors.DeadlineExceeded(),
    errors.Draining(),
    errors.DependencyAway("no etcd"),
    errors.NotFound("no such thing"),
    errors.OutOfRange("too old"),
    errors.Unimplemented("not offered"),
    errors.TooLarge("too large"),
    errors.TooMuchUnread("4 MB wait"),
    errors.Unauthenticated("no key"),
    errors.PermissionDenied("not your model", field="model", known=["mine"]),
    errors.RateLimited("too many requests", 1500),
    errors.Overloaded("too much work", 250),
    errors.ServiceRefused("expected the service token"),
]


@pytest.mark.parametrize("error", TYPED_ERRORS, ids=lambda error: type(error).__name__)
async def test_a_typed_error_comes_out_of_the_stub_as_it_went_in(error: errors.KvRouterError) -> None:
    worker = Worker()
    worker.failure = error
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(type(error)) as unary:
            await stub.abort(AbortRequest(), deadline=soon())
        with pytest.raises(type(error)) as stream:
            async for _ in stub.generate(WorkerServiceGenerateRequest(), deadline=soon()):
                pass
    for caught in (unary.value, stream.value):
        assert caught.code == error.code
        assert caught.info == error.info
        assert str(caught) == str(error)


def test_every_error_class_with_a_reason_is_among_those_tested() -> None:
    tested = {type(error).reason for error in TYPED_ERRORS}
    assert tested == set(ErrorReason.values())


async def test_a_retry_time_is_also_sent_as_googles_retry_info() -> None:
    worker = Worker()
    worker.failure = errors.AllBusy(1250)
    async with serving(WORKER, worker) as (_, channel):
        call: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = status_pb2.Status.FromString(dict(caught.value.trailing_metadata())[errors.STATUS_KEY])
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.ToMilliseconds() == 1250


def test_errors_survive_being_carried_in_another_message() -> None:
    for error in TYPED_ERRORS:
        restored = errors.from_parts(*errors.to_parts(error))
        assert type(restored) is type(error)
        assert restored.info == error.info
    assert errors.from_parts(4711, "odd").code == grpc.StatusCode.UNKNOWN


async def test_a_huge_message_in_an_error_does_not_break_the_call() -> None:
    worker = Worker()
    worker.failure = errors.BadRequest("x" * 100_000, advice="y" * 100_000, known=["z" * 9000] * 99)
    async with serving(WORKER, worker) as (_, channel):
        with pytest.raises(errors.BadRequest):
            await remote(WORKER, channel).abort(AbortRequest(), deadline=soon())


async def test_an_unexpected_exception_is_internal_and_tells_nothing() -> None:
    worker = Worker()
    worker.failure = KeyError("secret")
    async with serving(WORKER, worker) as (_, channel):
        stub = remote(WORKER, channel)
        with pytest.raises(errors.Internal) as caught:
            await stub.abort(AbortRequest(), deadline=soon())
        assert "secret" not in str(caught.value)
        assert "secret" not in str(caught.value.info)
        worker.failure = None
        assert (await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())).aborted == 1
