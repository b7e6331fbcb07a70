"""The running requests of an engine, and the calls that receive their output."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from kvrouter.net.calls.limits import MAX_UNREAD_BYTES, BufferFull, ResponseBuffer
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.serving.engine import Engine, GeneratorEngine, StepEngine
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.v1.errors import KvRouterError, TooMuchUnread
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.worker_pb2 import FinishReason, WorkerServiceGenerateRequest

log = get_logger(__name__)


class OutputCall(Protocol):
    """A Generate call, over whichever transport."""

    on_cancelled: Callable[[], None] | None
    """Called once if the call ends before it is ended here: cancelled, disconnected, or too much of it is unread."""

    def respond(self, encoded: bytes) -> None:
        """Sends a response. Never blocks."""

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""

    def fail(self, error: KvRouterError) -> None:
        """Ends the call with an error."""


@dataclass(slots=True)
class _Run:
    request_id: str
    attempt: int
    engine_id: str
    """The request's id at the engine, different in each attempt: late output of an aborted attempt is dropped."""
    call: OutputCall


class RunningRequests:
    """Runs requests on an engine. All methods but ``emit`` belong to the event loop."""

    def __init__(self, engine: StepEngine | Engine, *, structured_output: bool = False) -> None:
        """``structured_output`` says whether the engine constrains outputs."""
        self._structured_output = structured_output
        self._engine: StepEngine = engine if isinstance(engine, StepEngine) else GeneratorEngine(engine, self)
        self._by_engine_id: dict[str, _Run] = {}
        self._by_request_id: dict[str, _Run] = {}
        self._steps: deque[Iterable[RequestOutput]] = deque()
        self._scheduled = False
        self._delivering = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._aborting: set[asyncio.Future[int]] = set()

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def attach(self) -> None:
        """Delivers outputs on the running event loop from now on."""
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()

    def start(self, request: WorkerServiceGenerateRequest, call: OutputCall) -> None:
        """Starts a request whose output goes to a call. A later attempt replaces an earlier one of the same request.

        Raises:
            RequestRefused: the engine refuses it, or this attempt or a later one runs already.
        """
        if not self._structured_output and "structured_output" in request.sampling_options:
            raise RequestRefused(
                "this worker does not constrain outputs",
                field="sampling_options.structured_output",
                advice="Choose a worker whose engine has structured output.",
                retry_elsewhere=True,
            )
        request_id, attempt = request.request_id, request.attempt
        running = self._by_request_id.get(request_id)
        if running is not None:
            if running.attempt >= attempt:
                raise RequestRefused(
                    f"expected an attempt above {running.attempt}, which runs already, received {attempt}",
                    code=grpc.StatusCode.ALREADY_EXISTS,
                    reason=ErrorReason.ERROR_REASON_REQUEST_ID_REUSED,
                    field="request_id",
                    advice="Choose another id, or count the attempts of a request.",
                )
            self._end_aborted([running])
            self._abort_later([running.engine_id])
        if attempt:
            request.request_id = f"{request_id}.{attempt}"
        run = _Run(request_id, attempt, request.request_id, call)
        self._by_engine_id[run.engine_id] = self._by_request_id[request_id] = run
        call.on_cancelled = lambda: self._cancelled(run)
        try:
            self._engine.submit(request)
        except BaseException:
            call.on_cancelled = None
            self._forget(run)
            raise

    def emit(self, outputs: Iterable[RequestOutput]) -> None:
        """Passes the outputs of one step on. Callable from any thread; never blocks."""
        self._steps.append(outputs)
        if threading.get_ident() == self._loop_thread:
            self._deliver()
        elif self._loop is not None and not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                log.debug("emit.dropped", cause="the event loop is closed")

    def respond(self, engine_id: str, encoded: bytes) -> None:
        """Passes an encoded output of one request on."""
        run = self._by_engine_id.get(engine_id)
        if run is not None:
            run.call.respond(encoded)

    def end(self, engine_id: str) -> None:
        """Ends a request without further output."""
        run = self._by_engine_id.get(engine_id)
        if run is not None:
            self._forget(run)
            run.call.end()

    def refuse(self, engine_id: str, refusal: RequestRefused) -> None:
        """Ends a request with an error."""
        run = self._by_engine_id.get(engine_id)
        if run is not None:
            self._forget(run)
            run.call.fail(refusal.untraced())

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests, with the finish reason ABORT. Returns how many ran at the engine."""
        running = [run for each in request_ids if (run := self._by_request_id.get(each)) is not None]
        unknown = [each for each in request_ids if each not in self._by_request_id]
        self._end_aborted(running)
        return await self._engine.abort([run.engine_id for run in running] + unknown)

    async def close(self) -> None:
        """Aborts all running requests, and waits for the engine."""
        running = list(self._by_engine_id.values())
        self._end_aborted(running)
        if running:
            self._abort_later([run.engine_id for run in running])
        if self._aborting:
            await asyncio.wait(self._aborting)

    def _deliver(self) -> None:
        self._scheduled = False
        if self._delivering:
            return  # An output made the engine emit again, within the loop below.
        self._delivering = True
        try:
            while self._steps:
                for output in self._steps.popleft():
                    run = self._by_engine_id.get(output.request_id)
                    if run is not None:
                        self._pass_on(run, output)
        finally:
            self._delivering = False

    def _pass_on(self, run: _Run, output: RequestOutput) -> None:
        try:
            encoded = output.encode()
        except (struct.error, TypeError, ValueError):
            log.exception("output.invalid", request_id=run.request_id)
            self._forget(run)
            run.call.end(RequestOutput("", finish_reason=FinishReason.FINISH_REASON_ERROR).encode())
            self._abort_later([run.engine_id])
            return
        if not output.finish_reason:
            run.call.respond(encoded)
        else:
            self._forget(run)
            run.call.end(encoded)

    def _cancelled(self, run: _Run) -> None:
        if self._by_engine_id.get(run.engine_id) is run:
            self._forget(run)
            self._abort_later([run.engine_id])

    def _end_aborted(self, runs: Iterable[_Run]) -> None:
        for run in runs:
            self._forget(run)
            run.call.end(RequestOutput("", finish_reason=FinishReason.FINISH_REASON_ABORT).encode())

    def _forget(self, run: _Run) -> None:
        del self._by_engine_id[run.engine_id]
        if self._by_request_id.get(run.request_id) is run:
            del self._by_request_id[run.request_id]

    def _abort_later(self, engine_ids: Sequence[str]) -> None:
        aborting: asyncio.Future[int] = asyncio.ensure_future(self._engine.abort(engine_ids))
        self._aborting.add(aborting)
        aborting.add_done_callback(lambda _: self._aborted(aborting, engine_ids))

    def _aborted(self, aborting: asyncio.Future[int], engine_ids: Sequence[str]) -> None:
        self._aborting.discard(aborting)
        if not aborting.cancelled() and (error := aborting.exception()) is not None:
            log.error("abort.failed", request_ids=engine_ids, exc_info=error)


class GenerateCall:
    """An OutputCall with one task as its reader."""

    def __init__(self) -> None:
        self.on_cancelled: Callable[[], None] | None = None
        """Called once if the call ends before it is ended here."""
        self._buffer = ResponseBuffer()
        self._ended = False
        self._error: KvRouterError | None = None

    def respond(self, encoded: bytes) -> None:
        """Queues a response. If too much is unread, the call ends instead."""
        if self._ended:
            return
        try:
            self._buffer.append(encoded)
        except BufferFull as full:
            unread = f"the caller has not read {full.unread_bytes} bytes of output; the limit is {MAX_UNREAD_BYTES}"
            self.fail(TooMuchUnread(unread))
            self.cancel()

    def end(self, encoded: bytes | None = None) -> None:
        """Ends the call, with a last response if there is one."""
        if encoded is not None:
            self.respond(encoded)
        self._ended = True
        self._buffer.end()

    def fail(self, error: KvRouterError) -> None:
        """Ends the call with an error."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._buffer.end()

    def cancel(self) -> None:
        """Calls ``on_cancelled``, once."""
        self._ended = True
        notify, self.on_cancelled = self.on_cancelled, None
        if notify is not None:
            notify()

    async def write_to(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Writes the responses, one after the other, until the call has ended.

        Raises:
            KvRouterError: the call has failed.
        """
        while taken := await self._buffer.take():
            for response in taken:
                await write(response)
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # Its traceback refers to this frame.
