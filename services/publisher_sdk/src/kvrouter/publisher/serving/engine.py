"""The interfaces of an engine for the SDK: it emits the outputs of each step, or streams each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, runtime_checkable

import grpc
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.serving.outputs import encode_response
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.packed_pb2 import PackedWorkerPrompt
from kvrouter.v1.worker_pb2 import GenerateOutput, WorkerServiceGenerateRequest


def packed_prompt(request: WorkerServiceGenerateRequest) -> bytes:
    """Returns the token ids of a request as little-endian u32, in a twentieth of the time of ``request.token_ids``."""
    return PackedWorkerPrompt.FromString(request.SerializeToString()).token_ids


@runtime_checkable
class StepEngine(Protocol):
    """An engine with one call of ``Worker.emit`` for the outputs of a step."""

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        """Starts a request and returns at once. Runs on the event loop.

        The engine emits its output under ``request.request_id``, which no other request has, until one with a finish
        reason.

        Raises:
            RequestRefused: the request cannot be served.
        """

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests and returns how many of them were running; also called when a caller disconnects.

        The SDK has ended them already. Further output of them is dropped.
        """

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load by data-parallel rank. The SDK fills in rank, incarnation and time."""


class Engine(Protocol):
    """An engine with a stream of output for each request. ``StepEngine`` costs less per token."""

    def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        """Runs a request, as an async generator. It is closed early if the caller disconnects.

        Raises:
            RequestRefused: the request cannot be served.
        """

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests and returns how many of them were running; also called when a caller disconnects."""

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load by data-parallel rank. The SDK fills in rank, incarnation and time."""


class PublishOnly:
    """The engine of a publish-only worker: requests reach the real engine by another way."""

    def submit(self, request: WorkerServiceGenerateRequest) -> None:  # noqa: ARG002
        """Raises RequestRefused."""
        raise RequestRefused(
            "this worker publishes the cache of an engine and serves no requests",
            code=grpc.StatusCode.FAILED_PRECONDITION,
            advice="Send requests to the engine's own address.",
            retry_elsewhere=True,
        )

    async def abort(self, request_ids: Sequence[str]) -> int:  # noqa: ARG002
        """Returns 0: nothing runs."""
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        """Returns no load."""
        return {}


log = get_logger(__name__)


class _Outputs(Protocol):
    def respond(self, engine_id: str, encoded: bytes) -> None: ...

    def end(self, engine_id: str) -> None: ...

    def refuse(self, engine_id: str, refusal: RequestRefused) -> None: ...


class GeneratorEngine:
    """A StepEngine over an Engine: one task for each request."""

    def __init__(self, engine: Engine, outputs: _Outputs) -> None:
        self._engine = engine
        self._outputs = outputs
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        """Starts the request's generator."""
        request_id = request.request_id
        task = self._tasks[request_id] = asyncio.create_task(self._run(request), name=f"generate {request_id}")
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Closes the requests' generators, then aborts the requests at the engine."""
        tasks = [task for each in request_ids if (task := self._tasks.get(each)) is not None]
        for task in tasks:
            task.cancel()
        aborted = await self._engine.abort(request_ids)
        if tasks:
            await asyncio.wait(tasks)
        return aborted

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the engine's load."""
        return self._engine.load()

    async def _run(self, request: WorkerServiceGenerateRequest) -> None:
        request_id = request.request_id
        try:
            async with aclosing(_closable(self._engine.generate(request))) as outputs:
                async for output in outputs:
                    self._outputs.respond(request_id, encode_response(output.SerializeToString()))
            self._outputs.end(request_id)
        except RequestRefused as refusal:
            self._outputs.refuse(request_id, refusal)
        except Exception:
            log.exception("call.failed", method="generate")
            self._outputs.refuse(
                request_id,
                RequestRefused(
                    "the worker failed; its log has the cause",
                    code=grpc.StatusCode.INTERNAL,
                    reason=ErrorReason.ERROR_REASON_UNSPECIFIED,
                ),
            )


async def _closable(outputs: AsyncIterator[GenerateOutput]) -> Any:
    """Yields ``outputs``, and closes them when this generator is closed, if they can be closed."""
    try:
        async for output in outputs:
            yield output
    finally:
        close = getattr(outputs, "aclose", None)
        if close is not None:
            await close()
