"""Errors come out of a stub as they went into the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as standard
from grpc_status import rpc_status
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import errors
from kvrouter.v1.error_encoding import from_parts, to_parts
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason
from kvrouter.v1.worker_pb2 import AbortRequest, WorkerServiceGenerateRequest

from .rpc_harness import WORKER, Worker, serving, soon

STANDARD: tuple[type[Message], ...] = (
    standard.ErrorInfo,
    standard.RetryInfo,
    standard.BadRequest,
    standard.ResourceInfo,
    standard.Help,
)
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


def documented() -> dict[str, dict[str, str]]:
    """Returns the rows of the table of error types in the reference, by type."""
    text = (Path(__file__).parents[4] / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    lines = text.split("## Error types")[1].split("\n## ")[0].strip().splitlines()
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): dict(zip(columns, row, strict=True)) for row in rows}


ROWS = documented()


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
    tested = {type(error).defaults.reason for error in TYPED_ERRORS}
    assert tested == set(ErrorReason.values())


def failed_call(target: str) -> Any:
    """Returns the error of a call by grpcio's blocking API."""
    with grpc.insecure_channel(target) as channel:
        call: Any = channel.unary_unary("/kvrouter.v1.WorkerService/Abort")
        with pytest.raises(grpc.RpcError) as caught:
            call(b"", timeout=30)
        return caught.value


async def standard_details(error: errors.KvRouterError) -> tuple[Any, dict[type[Message], Any]]:
    """Returns the status of a failed call as grpcio-status reads it, and its standard details by type."""
    worker = Worker()
    worker.failure = error
    async with serving(WORKER, worker) as (server, _):
        failed = await asyncio.to_thread(failed_call, server.endpoint())
    status = rpc_status.from_call(failed)
    found = {}
    for packed in status.details:
        for kind in STANDARD:
            if packed.Is(kind.DESCRIPTOR):
                found[kind] = kind.FromString(packed.value)
    return status, found


@pytest.mark.parametrize("error", TYPED_ERRORS, ids=lambda error: type(error).__name__)
async def test_standard_details_are_those_that_the_reference_lists(error: errors.KvRouterError) -> None:
    status, found = await standard_details(error)
    row = ROWS[type(error).__name__]
    assert status.code == grpc.StatusCode[row["gRPC code"]].value[0]
    reason = found[standard.ErrorInfo]
    # Without a reason of the contract, the reason is the code.
    assert (reason.reason, reason.domain) == (row["reason"].replace("-", row["gRPC code"]), "kvrouter")
    assert (standard.RetryInfo in found) == (row["`RetryInfo`"] == "yes")
    names_field = bool(error.field) and row["gRPC code"] in ("INVALID_ARGUMENT", "OUT_OF_RANGE")
    assert (standard.BadRequest in found) == names_field
    assert (standard.ResourceInfo in found) == bool(error.info.resource_name)
    helps = [link.description for link in found[standard.Help].links] if standard.Help in found else []
    assert helps == [error.advice] * bool(error.advice)
    assert status.message.endswith(error.advice)


async def test_standard_libraries_read_reason_and_retry_time() -> None:
    status, found = await standard_details(errors.AllBusy(1250))
    assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.message == "every eligible worker is busy. Retry after the given time."
    assert found[standard.RetryInfo].retry_delay.ToMilliseconds() == 1250
    assert found[standard.ErrorInfo] == standard.ErrorInfo(reason="ALL_BUSY", domain="kvrouter")
    assert found[standard.Help].links[0].description == "Retry after the given time."
    assert found.keys() == {standard.RetryInfo, standard.ErrorInfo, standard.Help}


async def test_standard_libraries_read_the_field_at_fault() -> None:
    _, found = await standard_details(errors.BadRequest("bad", field="a.b", advice="Do this."))
    (violation,) = found[standard.BadRequest].field_violations
    assert (violation.field, violation.description) == ("a.b", "bad")
    assert found[standard.ErrorInfo].metadata == {"field": "a.b"}
    assert standard.RetryInfo not in found


@pytest.mark.parametrize(
    ("error", "kind", "name"),
    [
        (errors.UnknownModel("m", ["x", "y"]), "model", "m"),
        (errors.UnknownWorker(7, [1, 2]), "worker", "7"),
        (errors.UnknownWorker(7, [1, 2], dp_rank=3), "worker", "7:3"),
        (errors.UnknownComponent("n/c"), "component", "n/c"),
        (errors.RequestIdReused("r"), "request", "r"),
        (errors.SessionLost("s"), "session", "s"),
    ],
)
async def test_standard_libraries_read_what_does_not_exist(error: errors.KvRouterError, kind: str, name: str) -> None:
    _, found = await standard_details(error)
    resource = found[standard.ResourceInfo]
    assert (resource.resource_type, resource.resource_name, resource.description) == (kind, name, error.message)
    known = ", ".join(error.info.known_values)
    assert found[standard.ErrorInfo].metadata.get("known_values", "") == known


async def test_an_error_that_exceeds_the_metadata_keeps_its_own_details_and_the_reason() -> None:
    error = errors.BadRequest("x" * 600, field="f" * 600, advice="y" * 600, known=["z" * 200] * 20)
    status, found = await standard_details(error)
    assert any(packed.Is(ErrorInfo.DESCRIPTOR) for packed in status.details)
    assert status.ByteSize() < 4300
    assert standard.Help not in found


def test_errors_survive_being_carried_in_another_message() -> None:
    for error in TYPED_ERRORS:
        restored = from_parts(*to_parts(error))
        assert type(restored) is type(error)
        assert restored.info == error.info
    assert from_parts(4711, "odd").code == grpc.StatusCode.UNKNOWN


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
