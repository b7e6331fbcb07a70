"""One call of a request to a worker, as a state machine the worker's responses and its health drive.

Every event is processed in one step, without a task: a response goes from the connection's reader to the client's
buffer in one call. The attempt ends exactly once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, cast

import grpc
import msgspec
import structlog
from google.protobuf.message import DecodeError
from kvrouter.core import OutputWriter, TokenWriter, read_output
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.workers.failures import Fault, WorkerFailure, WorkerFate, fault_of
from kvrouter.frontend.workers.observed_worker import WorkerCall
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.frontend.workers.worker_request import WorkerRequest
from kvrouter.net.calls import NotSent, OutcomeUnknown
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import Stage
from kvrouter.v1.errors import DeadlineExceeded, Draining, KvRouterError, WorkerLost
from kvrouter.v1.worker_pb2 import FinishReason

log = structlog.get_logger(component="frontend")

_ENGINE_FAILED = frozenset({FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_ABORT})
_ENGINE_MAY_DIE = frozenset({"error", "unfinished"})
"""Failures with which an engine may answer before its process ends."""
_HARMLESS = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED})
"""Codes with which a worker fails a request that does not harm it."""
_UNFINISHED = FinishReason.FINISH_REASON_UNSPECIFIED

_MOST_WRITTEN = 256
"""Tokens that a writer takes before they are counted here. It keeps their ids until then."""

Outcome = WorkerFailure | Exception | None
"""How an attempt ended: by its worker's fault, by an error for the client, or complete."""


class RunningCall(Protocol):
    """A call to a worker."""

    def cancel(self) -> object:
        """Cancels the call; its receiver gets nothing more. Has no effect on a call that has ended."""


class Dispatch(msgspec.Struct, eq=False):
    """A request for one worker."""

    worker_id: int
    endpoint: str
    request: WorkerRequest
    prompt: bytes
    """Its token ids, packed."""
    on_output: Callable[[Output], OutputWriter | None]
    """Called with each piece; the last one has a finish reason. An exception from it ends the attempt.

    It may return a writer, to which the following pieces are offered first.
    """
    deadline: Deadline
    may_leave: Callable[[str], bool]
    """Returns whether the request may leave its worker for a cause, as in ``WorkerFailure``: because another one could
    take it, or continue it once it has output."""
    stays_a_probe: bool = False
    """Whether to wait for one more missed probe before leaving a worker that does not answer."""
    on_written: Callable[[int, bytes, int], None] = lambda _tokens, _token_ids, _last_ns: None
    """Called with the number of tokens that the writer has taken, their packed ids if it knows them, and the time of
    the last one: before a piece passes that it does not take, and before the attempt ends."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt) // TOKEN_BYTES

    @property
    def shares_blame(self) -> bool:
        """Whether the worker receives its prompt from another worker, which may be at fault if it fails.

        Before its first output such a failure counts against the worker only by ``WorkerAttempt.blame``.
        """
        return self.request.stage == Stage.STAGE_DECODE and self.request.transfer_params is not None


class WorkerAttempt:
    """Receives a worker's output of one request, and limits and classifies it."""

    unattributed: WorkerFailure | None = None
    """Its failure, if it may not be its worker's fault."""
    _writer: OutputWriter | None = None
    """Takes pieces that have only tokens."""
    _missed_to_leave = 0
    """Number of missed probes at which a suspected worker is left."""
    _call: RunningCall | None = None
    _over = False
    _has_output = False
    _finish_reason: FinishReason = _UNFINISHED

    def __init__(
        self, dispatch: Dispatch, health: WorkerCall, metrics: FrontendMetrics, *, max_tokens: int | None = None
    ) -> None:
        """Calls nothing yet; ``start`` must follow.

        Args:
            dispatch: The request and its worker.
            health: The call as the worker's health counts it; it ends with the attempt.
            metrics: The Frontend's metrics.
            max_tokens: Number of tokens after which the output ends, even if the worker generates more; None for that
                of the request.
        """
        self.ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        """Done when the attempt has ended."""
        self._dispatch = dispatch
        self._on_output = dispatch.on_output
        self._health = health
        self._worker = health.worker
        self._metrics = metrics
        self._max_tokens = dispatch.request.stop.max_tokens if max_tokens is None else max_tokens
        self._left = self._max_tokens
        """Tokens that may yet arrive, whether or not the worker keeps to the limit.

        ``_settle`` subtracts those that the writer has taken.
        """

    def start(self, call: Callable[[WorkerAttempt], RunningCall]) -> None:
        """Makes the call, unless the worker is known not to answer and another could take the request."""
        self._health.watch(self._leave_if_needed)
        self._wait_for_output()
        if not self._over:
            running = call(self)
            if self._over:
                running.cancel()
            else:
                self._call = running

    def cancel(self) -> None:
        """Ends the attempt and cancels the call. Has no effect on an attempt that has ended."""
        self._end(None)

    def abandon(self) -> WorkerFate | None:
        """Cancels the attempt, as ``cancel``. Returns the fate of its worker if that misses probes meanwhile.

        Returns None for a worker that answers, or if the client and the deadline did not end the request.
        """
        fate, ended = None, self.ended
        if self._worker.missed:
            timed_out = ended.done() and not ended.cancelled() and isinstance(ended.result(), DeadlineExceeded)
            fate = self._health.fate() if timed_out or not self._over else None
        if not self._over:
            self._end(None)
        return fate

    def blame(self) -> None:
        """Counts a failure against the worker not attributed yet."""
        if self.unattributed is not None:
            self._health.failed(self.unattributed)
            self.unattributed = None

    def fail(self, error: Exception) -> bool:
        """Ends the attempt with an error that is not its worker's, unless it has output. Returns whether it did."""
        if self._over or self._has_output:
            return False
        self._end(error)
        return True

    def on_response(self, encoded: bytes) -> TokenWriter | None:
        """Passes a piece on that a worker has sent, an encoded WorkerServiceGenerateResponse.

        Returns a writer, to which the following pieces are offered first; None without one.
        """
        if not self.offer(encoded):
            self._settle()
            worker = self._worker
            worker.pieces += 1
            if not ((self._over or self._finish_reason or worker.missed) and self._has_finished()):
                self._read(encoded)
        return cast("TokenWriter | None", self._writer)

    def _read(self, encoded: bytes) -> None:
        """Passes a piece on that the writer has not taken."""
        plain = read_output(encoded)
        if plain is not None and self._has_output:
            token_ids, finish_reason, cached_tokens = plain
            count = len(token_ids)
            if not finish_reason and cached_tokens is None and count <= self._left:
                self._left -= count
                self._pass_on(Output(count, token_ids, encoded))
                return
        try:
            output = DetailedOutput.read(encoded, plain)
        except DecodeError:
            self._end_failed(self._note("malformed", "sent a message that is no WorkerServiceGenerateResponse"))
        else:
            self._take(output)

    @property
    def has_writer(self) -> bool:
        """Whether the next piece may be offered to a writer."""
        return self._writer is not None

    def offer(self, data: bytes) -> bool:
        """Offers the writer what a worker, or an engine over its OpenAI API, has sent.

        Returns False if the writer has not taken it.
        """
        writer = self._writer
        if writer is None:
            return False
        try:
            return writer.take(data)
        except Exception as error:
            self._receiver_failed(error)
            return True

    def take(self, output: Output) -> None:
        """Passes a piece on that an engine has sent over its OpenAI API."""
        self._settle()
        self._worker.pieces += 1
        if (self._over or self._finish_reason or self._worker.missed) and self._has_finished():
            return
        if self._has_output and not output.finish_reason and output.tokens <= self._left:
            self._left -= output.tokens
            self._pass_on(output)
        else:
            self._take(output)

    def _has_finished(self) -> bool:
        """Returns whether a further piece comes after the end of the output, and is ignored."""
        if self._over:
            return True
        if self._worker.missed:
            self._health.answered()
        if self._finish_reason:
            self._finish()
            return True
        return False

    def _take(self, output: Output) -> None:
        """Passes a piece on that begins or ends the output, or has more than tokens."""
        is_overrun = output.tokens > self._left
        if is_overrun:
            output = output.first(self._left)
        self._left -= output.tokens
        self._finish_reason = output.finish_reason
        if not self._has_output:
            if output.tokens:
                self._has_output = True
                self._missed_to_leave = 0
                self._health.responded()
            else:
                self._wait_for_output()
        if output.finish_reason in _ENGINE_FAILED:
            failure = self._note("error", f"ended the request with {FinishReason.Name(output.finish_reason)}")
            if not self._has_output:
                self._end(failure)
            elif self._dispatch.may_leave("error"):
                if output.tokens:  # The request continues on another worker.
                    self._pass_on(output.without("finish_reason"))
                self._end(failure)
        if not self._over:
            self._pass_on(output)
            if is_overrun and not self._over:
                self._stop_overrun()

    def on_end(self) -> None:
        """Ends the attempt, since the worker has sent all of its response."""
        self._call = None
        if self._over:
            return
        if self._finish_reason != _UNFINISHED:
            self._finish()
        else:
            self._end_failed(None)

    def on_error(self, error: Exception) -> None:
        """Ends the attempt, since the call failed with a KvRouterError; any other error is a defect."""
        self._call = None
        if self._over:
            return
        if not isinstance(error, KvRouterError):
            self._end(error)
        elif self._finish_reason != _UNFINISHED:
            self._finish()
        else:
            self._end_failed(self._judge(error))

    def _pass_on(self, output: Output) -> None:
        try:
            writer = self._on_output(output)
        except Exception as error:
            self._receiver_failed(error)
        else:
            if writer is not None and not self._over:
                writer.limit = min(self._left, _MOST_WRITTEN)
                writer.worker = self._worker
                self._writer = writer

    def _settle(self) -> None:
        """Counts the tokens that the writer has taken, and lets it take no more."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.worker = None
        tokens, token_ids = writer.taken()
        if tokens:
            self._left -= tokens
            self._dispatch.on_written(tokens, token_ids, writer.last_ns)

    def _receiver_failed(self, error: Exception) -> None:
        """Ends the attempt. The error is raised in the request's task, since the connection serves other requests."""
        self._end(error.untraced() if isinstance(error, KvRouterError) else error)

    def _wait_for_output(self) -> None:
        worker = self._worker
        self._missed_to_leave = worker.missed + self._dispatch.stays_a_probe
        if worker.should_be_left:
            self._leave_if_needed()

    def _leave_if_needed(self) -> None:
        health, worker = self._health, self._worker
        if self._over:
            return
        if health.is_lost and self._dispatch.may_leave("lost"):
            self._leave("lost", "is lost: its registration has ended, and it does not answer")
        elif health.is_stalled and self._dispatch.may_leave("stalled"):
            self._leave("stalled", "generates nothing any more")
        elif health.is_leaving and self._dispatch.may_leave("drained"):
            worker_id = self._dispatch.worker_id
            self._end(WorkerFailure(worker_id, "drained", f"worker {worker_id} is being drained"))
        elif worker.suspected and worker.missed >= self._missed_to_leave and self._dispatch.may_leave("silent"):
            self._leave("silent", f"stopped answering: it missed {worker.missed} probes in a row")

    def _leave(self, cause: str, what: str) -> None:
        """Ends the attempt at a worker that does not go on with it.

        That is not counted against the worker: probes and stall detection decide when it is avoided.
        """
        self._metrics.worker_failures.labels(cause=cause).inc()
        message = f"worker {self._dispatch.worker_id} {what}"
        self._end(WorkerFailure(self._dispatch.worker_id, cause, message, fate=self._health.fate()))

    def _finish(self) -> None:
        if self._finish_reason not in _ENGINE_FAILED:
            self._health.completed()
        self._end(None)

    def _end_failed(self, outcome: Outcome) -> None:
        """Ends output with no finish reason. At max_tokens it is complete for the client nevertheless."""
        self._settle()
        if not self._left:
            self._pass_on(DetailedOutput.last())
            self._end(None)
        else:
            self._end(outcome or self._note("unfinished", "ended its answer unfinished"))

    def _stop_overrun(self) -> None:
        self._metrics.output_overruns.inc()
        log.warning(
            "worker.exceeded_max_tokens",
            worker=self._dispatch.worker_id,
            request_id=self._dispatch.request.request_id,
            max_tokens=self._max_tokens,
            consequence="the answer ends at the limit, the call is cancelled",
        )
        self._finish()

    def _judge(self, error: KvRouterError) -> WorkerFailure | KvRouterError:
        """Returns the failure, recorded, if the worker is at fault; otherwise the error for the client."""
        fault = fault_of(error, self._dispatch.deadline)
        if fault is Fault.WORKER:
            unknown = isinstance(error, OutcomeUnknown)
            not_taken = isinstance(error, NotSent) or (isinstance(error, Draining) and not self._has_output)
            # A sidecar, which lives on, says so of its engine.
            died = unknown or isinstance(error, WorkerLost)
            # Taken first, since a worker that signs off, or is known to have died, is another one afterwards.
            fate = None if not_taken or error.code in _HARMLESS else self._health.fate(connection_lost=died)
            failure = self._note(error.code.name, f"failed with {error.code.name}: {error.message}")
            return replace(failure, outcome_unknown=unknown, not_taken=not_taken, fate=fate)
        worker = self._worker
        if fault is Fault.DEADLINE and worker.suspected:
            return DeadlineExceeded(
                f"the deadline has passed; worker {self._dispatch.worker_id} has missed {worker.missed} probes in a row"
            )
        return error.untraced()

    def _note(self, cause: str, what: str) -> WorkerFailure:
        fate = self._health.fate() if cause in _ENGINE_MAY_DIE else None
        failure = WorkerFailure(self._dispatch.worker_id, cause, f"worker {self._dispatch.worker_id} {what}", fate=fate)
        self._metrics.worker_failures.labels(cause=cause).inc()
        if self._dispatch.shares_blame and not self._has_output:
            self.unattributed = failure
        else:
            self._health.failed(failure)
        return failure

    def _end(self, outcome: Outcome) -> None:
        if self._over:
            return
        self._settle()
        self._over = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._health.end()
        if not self.ended.done():
            self.ended.set_result(outcome)
