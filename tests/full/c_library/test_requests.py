"""Requests of an engine in C that end early."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from kvrouter.v1.worker_pb2 import (
    AbortRequest,
    AbortResponse,
    FinishReason,
    StopConditions,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)

from ...faults.rig import COMPONENT, Rig
from .programs import HERE, compiled


@dataclass
class SlowEngine:
    """The program ``slow_engine.c``, and a channel to it."""

    channel: grpc.aio.Channel
    output: asyncio.StreamReader
    input: asyncio.StreamWriter

    def generate(self, request_id: str, attempt: int = 0) -> grpc.aio.UnaryStreamCall:
        method = self.channel.unary_stream(
            "/kvrouter.v1.WorkerService/Generate",
            request_serializer=WorkerServiceGenerateRequest.SerializeToString,
            response_deserializer=WorkerServiceGenerateResponse.FromString,
        )
        stop = StopConditions(max_tokens=5)
        return method(
            WorkerServiceGenerateRequest(request_id=request_id, attempt=attempt, token_ids=[7, 8], stop_conditions=stop)
        )

    async def abort(self, *request_ids: str) -> int:
        method = self.channel.unary_unary(
            "/kvrouter.v1.WorkerService/Abort",
            request_serializer=AbortRequest.SerializeToString,
            response_deserializer=AbortResponse.FromString,
        )
        return int((await method(AbortRequest(request_ids=request_ids))).aborted)

    def begin(self) -> None:
        """Lets the engine poll."""
        self.input.write(b"\n")

    async def polled(self) -> str:
        return (await self.output.readline()).decode().rstrip()


@pytest.fixture
async def engine(rig: Rig, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SlowEngine]:
    program = compiled(HERE / "slow_engine.c", tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(program, str(COMPONENT), rig.etcd.endpoint, rig.nats.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdin is not None
        said = (await process.stdout.readline()).decode().split()
        async with grpc.aio.insecure_channel(said[1]) as channel:
            slow = SlowEngine(channel, process.stdout, process.stdin)
            if not getattr(request, "param", False):
                slow.begin()
            yield slow
    finally:
        process.kill()
        await process.communicate()


async def first(call: grpc.aio.UnaryStreamCall) -> list[int]:
    return list((await call.read()).output.token_ids)


async def test_an_aborted_request_ends_and_its_engine_learns_of_it(engine: SlowEngine) -> None:
    call = engine.generate("a")
    assert await first(call) == [7]
    assert await engine.polled() == "request a"
    assert await engine.abort("a", "unknown") == 1
    assert (await call.read()).output.finish_reason == FinishReason.FINISH_REASON_ABORT
    assert await call.read() is grpc.aio.EOF
    assert await engine.polled() == "abort a"
    assert await engine.abort("a") == 0


async def test_an_engine_learns_of_a_caller_that_left(engine: SlowEngine) -> None:
    call = engine.generate("a")
    assert await first(call) == [7]
    call.cancel()
    assert [await engine.polled(), await engine.polled()] == ["request a", "abort a"]


@pytest.mark.parametrize("engine", [True], indirect=True, ids=["polls later"])
async def test_a_request_that_ends_before_it_is_polled_is_dropped(engine: SlowEngine) -> None:
    aborted, cancelled, kept = engine.generate("a"), engine.generate("b"), engine.generate("c")
    for call in (aborted, cancelled, kept):
        await call.initial_metadata()
    assert await engine.abort("a") == 1
    cancelled.cancel()
    await engine.abort("b")  # the worker may not have noticed that its caller left
    engine.begin()
    assert await first(kept) == [7]
    kept.cancel()
    assert [await engine.polled(), await engine.polled()] == ["request c", "abort c"]


async def test_a_later_attempt_replaces_an_earlier_one(engine: SlowEngine) -> None:
    former, same = engine.generate("a"), engine.generate("b")
    assert await first(former) == [7]
    assert await first(same) == [7]
    assert {await engine.polled(), await engine.polled()} == {"request a", "request b"}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await first(engine.generate("b"))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    later = engine.generate("a", attempt=1)
    assert await first(later) == [7]
    assert (await former.read()).output.finish_reason == FinishReason.FINISH_REASON_ABORT
    assert [await engine.polled(), await engine.polled()] == ["abort a", "request a.1"]
