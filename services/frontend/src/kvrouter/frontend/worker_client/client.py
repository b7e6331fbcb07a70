"""Runs one attempt of a request on one worker, and classifies its failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

import structlog
from google.protobuf.message import DecodeError
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.worker_client.failures import AttemptFailed, Fault, WorkerFailure, fault_of
from kvrouter.frontend.worker_client.health import WorkerCall, WorkerHealth
from kvrouter.frontend.worker_client.output_limit import OutputLimit, WorkerPiece
from kvrouter.frontend.worker_client.pool import WorkerPool
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.errors import DeadlineExceeded, KvRouterError
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest

log = structlog.get_logger(component="frontend")

_ENGINE_FAILED = frozenset({FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_ABORT})


class WorkerClient:
    """Calls workers, limits their output, and records their health."""

    def __init__(self, pool: WorkerPool, health: WorkerHealth, metrics: FrontendMetrics) -> None:
        self._pool = pool
        self._metrics = metrics
        self.health = health

    async def generate(
        self,
        worker_id: int,
        endpoint: str,
        request: WorkerServiceGenerateRequest,
        *,
        deadline: Deadline,
        has_alternative: Callable[[], bool],
        stays_a_probe: bool = False,
    ) -> AsyncGenerator[WorkerPiece, None]:
        """Yields the worker's output; the last piece has a finish reason.

        The output ends at ``max_tokens`` even if the worker generates more. While there is no output, the attempt
        leaves a worker that stops answering probes as soon as ``has_alternative`` returns True. With
        ``stays_a_probe`` it waits for one more missed probe first.

        Raises:
            AttemptFailed: the worker is at fault.
            KvRouterError: the request is at fault, or the deadline has passed.
        """
        call = self.health.begin(endpoint)
        request_id, max_tokens = request.request_id, request.stop_conditions.max_tokens
        limit = OutputLimit(max_tokens)
        has_output = finished = False
        try:
            pieces = self._pool.generate(endpoint, request, deadline=deadline)
            del request  # A long prompt: once it is encoded, the message is not needed.
            async with aclosing(pieces) as answer:
                while True:
                    try:
                        if has_output:
                            encoded = await anext(answer, None)
                        else:
                            encoded = await _first(answer, worker_id, call, has_alternative, stays_a_probe)
                        if encoded is None:
                            break
                        call.heard()
                        if finished:
                            break  # A finish reason ends the output; whatever follows is ignored.
                        piece = limit.cut(WorkerPiece.parse(encoded))
                    except (KvRouterError, DecodeError, AttemptFailed) as error:
                        if finished:
                            break
                        failure = self._judge(call, worker_id, error, deadline)
                        if limit.reached:
                            break
                        if failure is None:
                            raise
                        raise AttemptFailed(failure) from None
                    output = piece.output
                    finished = output.finish_reason != FinishReason.FINISH_REASON_UNSPECIFIED
                    if output.finish_reason in _ENGINE_FAILED:
                        reason = FinishReason.Name(output.finish_reason)
                        failure = self._note(call, worker_id, "error", f"ended the request with {reason}")
                        if not has_output and not output.token_ids:
                            raise AttemptFailed(failure)
                    if output.token_ids and not has_output:
                        has_output = True
                        call.responded()
                    yield piece
                    if limit.overrun:
                        self._metrics.output_overruns.inc()
                        log.warning(
                            "worker.exceeded_max_tokens",
                            worker=worker_id,
                            request_id=request_id,
                            max_tokens=max_tokens,
                            consequence="the answer ends at the limit, the call is cancelled",
                        )
                        break
            if finished:
                if output.finish_reason not in _ENGINE_FAILED:
                    call.completed()
            elif limit.reached:
                yield limit.last_piece()
            else:
                raise AttemptFailed(self._note(call, worker_id, "unfinished", "ended its answer unfinished"))
        finally:
            call.end()

    def _judge(
        self, call: WorkerCall, worker_id: int, error: KvRouterError | DecodeError | AttemptFailed, deadline: Deadline
    ) -> WorkerFailure | None:
        """Records a failure if the worker is at fault, and returns it; returns None otherwise.

        Raises:
            DeadlineExceeded: the deadline has passed, and the worker does not answer probes.
        """
        if isinstance(error, AttemptFailed):
            self._metrics.worker_failures.labels(cause=error.failure.cause).inc()
            return error.failure  # Probes alone decide when a silent worker is suspected or recovers.
        if isinstance(error, DecodeError):
            return self._note(call, worker_id, "malformed", "sent a message that is no WorkerServiceGenerateResponse")
        fault = fault_of(error, deadline)
        if fault is Fault.WORKER:
            return self._note(call, worker_id, error.code.name, f"failed with {error.code.name}: {error}")
        if fault is Fault.DEADLINE and call.is_suspected:
            raise DeadlineExceeded(
                f"the deadline has passed; worker {worker_id} has missed {call.missed_probes} probes in a row"
            )
        return None

    def _note(self, call: WorkerCall, worker_id: int, cause: str, what: str) -> WorkerFailure:
        failure = WorkerFailure(worker_id, cause, f"worker {worker_id} {what}")
        self._metrics.worker_failures.labels(cause=cause).inc()
        call.failed(failure)
        return failure


async def _first(
    answer: AsyncIterator[bytes],
    worker_id: int,
    call: WorkerCall,
    has_alternative: Callable[[], bool],
    stays_a_probe: bool,
) -> bytes | None:
    """Returns the first piece of the output; None if the stream ends without one.

    Raises:
        AttemptFailed: the worker stopped answering probes, and another worker could take the request.
    """
    reading: asyncio.Future[Any] = asyncio.create_task(_next(answer))
    enough = call.missed_probes + stays_a_probe
    try:
        while not reading.done():
            if call.is_suspected and call.missed_probes >= enough and has_alternative():
                message = f"worker {worker_id} stopped answering: it missed {call.missed_probes} probes in a row"
                raise AttemptFailed(WorkerFailure(worker_id, "silent", message))
            woken = call.wake_up()
            try:
                await asyncio.wait({reading, woken}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                call.forget(woken)
    except BaseException:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
        raise
    try:
        return cast("bytes | None", reading.result())
    finally:
        del reading  # Its exception and this frame would keep each other alive.


async def _next(answer: AsyncIterator[bytes]) -> bytes | None:
    return await anext(answer, None)
