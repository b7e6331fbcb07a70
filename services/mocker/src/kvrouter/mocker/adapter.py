"""Connects the simulated engine to the publisher SDK: requests, output, load and cache events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc
import structlog
from kvrouter.core import Scope as CoreScope
from kvrouter.mocker.answers import Answers
from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.driver import Emit, EngineDriver, Publish, Tokens
from kvrouter.mocker.engine.types import (
    CacheEvent,
    Cleared,
    DuplicateRequest,
    EngineRequest,
    FinishReason,
    PromptTooLong,
    QueueFull,
    Removed,
    RequestRefused as EngineRefused,
    Scope,
    Stored,
)
from kvrouter.mocker.handover import Handover
from kvrouter.mocker.logprobs import Logprobs
from kvrouter.mocker.tiers import TIERS
from kvrouter.publisher.errors import RequestRefused
from kvrouter.publisher.publishing.rank_publisher import RankPublisher
from kvrouter.publisher.serving.engine import packed_prompt
from kvrouter.publisher.serving.outputs import RequestOutput
from kvrouter.v1.common_pb2 import LowerTiers, Stage
from kvrouter.v1.errors_pb2 import ErrorReason
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.worker_pb2 import FinishReason as WireFinishReason, GenerateOutput, WorkerServiceGenerateRequest

log = structlog.get_logger(component="mocker")

_FINISH = {
    FinishReason.LENGTH: WireFinishReason.FINISH_REASON_LENGTH,
    FinishReason.STOP: WireFinishReason.FINISH_REASON_STOP,
    FinishReason.ABORT: WireFinishReason.FINISH_REASON_ABORT,
}


def publish_to(rank: Callable[[], RankPublisher]) -> Publish:
    """Returns the receiver of cache events. ``rank`` is called late, because the SDK creates it after the engine."""

    def publish(events: Iterable[CacheEvent]) -> None:
        for event in events:
            match event:
                case Stored(parent_hash, engine_hashes, tokens, scope, tier):
                    rank().stored(
                        token_ids=memoryview(tokens).cast("I"),
                        engine_hashes=engine_hashes,
                        parent=parent_hash,
                        scope=CoreScope(*scope),
                        tier=TIERS[tier],
                    )
                case Removed(engine_hashes, tier):
                    rank().removed(engine_hashes, tier=TIERS[tier])
                case Cleared():
                    rank().cleared()

    return publish


def emit_to(emit: Callable[[Iterable[RequestOutput]], None], *finish: Callable[[RequestOutput], None]) -> Emit:
    """Returns the receiver of a step's outputs, which passes them to the SDK after ``finish`` has completed them."""

    def emit_step(outputs: Iterable[tuple[str, Tokens]]) -> None:
        converted = [_output(request_id, tokens) for request_id, tokens in outputs]
        for complete in finish:
            for output in converted:
                complete(output)
        emit(converted)

    return emit_step


class MockEngine:
    """The engines of all data-parallel ranks, behind the SDK's StepEngine protocol."""

    def __init__(
        self,
        drivers: Mapping[int, EngineDriver],
        handover: Handover | None = None,
        emit: Callable[[Iterable[RequestOutput]], None] = lambda _: None,
        logprobs: Logprobs | None = None,
        answers: Answers | None = None,
    ) -> None:
        """Sets up the engine.

        Args:
            drivers: The engine of each rank.
            handover: Hands prompts over; None for an engine with both roles.
            emit: Receives what ends requests whose hand-over fails.
            logprobs: Adds log probabilities to outputs.
            answers: The outputs that are not drawn; None without a tokenizer.
        """
        self._answers = answers
        self._logprobs = logprobs or Logprobs()
        self._drivers = drivers
        self._handover = handover
        self._emit = emit

    def submit(self, request: WorkerServiceGenerateRequest) -> None:
        """Starts a request on its rank.

        Raises:
            RequestRefused: the rank does not exist, or its engine refuses the request.
        """
        driver = self._drivers.get(request.dp_rank)
        if driver is None:
            raise RequestRefused(
                f"the worker has no rank {request.dp_rank}", field="dp_rank", known=self._drivers, code=_NOT_FOUND
            )
        engine_request = _engine_request(request, self._answer(request))

        def start() -> None:
            try:
                driver.submit(engine_request)
            except EngineRefused as refusal:
                raise _refused(refusal) from None

        if self._handover is None or not self._handover.concerns(request):
            start()
        else:
            self._handover.submit(request, start, lambda why: self._fail(request.request_id, why))
        self._logprobs.begin(request.request_id, request.sampling_options.logprobs)

    def _answer(self, request: WorkerServiceGenerateRequest) -> tuple[int, ...]:
        try:
            return () if self._answers is None else self._answers.answer(request)
        except Unsupported as error:
            raise RequestRefused(str(error), field="sampling_options.structured_output") from None

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Aborts requests on whichever rank, and returns how many of them were running or waiting."""
        self._logprobs.forget(request_ids)
        return sum(self._abort(request_id) for request_id in request_ids)

    def _abort(self, request_id: str) -> bool:
        handed_over = self._handover is not None and self._handover.abort(request_id)
        aborted = [driver.abort(request_id) for driver in self._drivers.values()]
        return any(aborted) or handed_over

    def _fail(self, request_id: str, why: str) -> None:
        log.warning("request.failed", request_id=request_id, cause=why)
        self._logprobs.forget([request_id])
        self._emit([RequestOutput(request_id, finish_reason=WireFinishReason.FINISH_REASON_ERROR)])

    def load(self) -> Mapping[int, LoadReport]:
        """Returns the load by rank."""
        loads = {dp_rank: _load(driver) for dp_rank, driver in self._drivers.items()}
        if self._handover is not None and loads:
            loads[min(loads)].active_blocks += self._handover.kept_blocks
        return loads


_NOT_FOUND = grpc.StatusCode.NOT_FOUND


def _engine_request(request: WorkerServiceGenerateRequest, output: tuple[int, ...]) -> EngineRequest:
    scope, sampling, stop = request.scope, request.sampling_options, request.stop_conditions
    return EngineRequest(
        request_id=request.request_id,
        prompt=packed_prompt(request),
        max_tokens=stop.max_tokens,
        scope=Scope(scope.lora_name, scope.cache_salt, scope.tenant),
        stop_token_ids=frozenset(stop.stop_token_ids),
        min_tokens=stop.min_tokens,
        ignore_eos=stop.ignore_eos,
        output=output,
        seed=sampling.seed if "seed" in sampling else None,
        received=request.stage != Stage.STAGE_PREFILL and "transfer_params" in request,
    )


def _refused(refusal: EngineRefused) -> RequestRefused:
    match refusal:
        case PromptTooLong():
            return RequestRefused(
                str(refusal),
                reason=ErrorReason.ERROR_REASON_PROMPT_TOO_LONG,
                field="token_ids",
                advice="Send a shorter prompt.",
            )
        case QueueFull():
            return RequestRefused(
                str(refusal),
                code=grpc.StatusCode.RESOURCE_EXHAUSTED,
                reason=ErrorReason.ERROR_REASON_ALL_BUSY,
                advice="Retry later, or at another worker.",
                retry_elsewhere=True,
            )
        case DuplicateRequest():
            return RequestRefused(
                str(refusal),
                code=grpc.StatusCode.ALREADY_EXISTS,
                reason=ErrorReason.ERROR_REASON_REQUEST_ID_REUSED,
                field="request_id",
                advice="Choose another id.",
            )
        case _:
            return RequestRefused(str(refusal))


def _output(request_id: str, tokens: Tokens) -> RequestOutput:
    details = GenerateOutput(token_engine_ns=[round(stamp * 1e9) for stamp in tokens.stamps])
    output = RequestOutput(request_id, tokens.token_ids, details=details)
    if tokens.first is not None:
        output.cached_tokens = tokens.first.cached_tokens
        if tokens.first.host_tokens or tokens.first.shared_tokens:
            lower = LowerTiers(host=tokens.first.host_tokens, shared=tokens.first.shared_tokens)
            details.lower_cached_tokens.CopyFrom(lower)
        details.arrived_engine_ns = round(tokens.first.submitted_at * 1e9)
    if tokens.finish_reason is not None:
        output.finish_reason = _FINISH[tokens.finish_reason]
    return output


def _load(driver: EngineDriver) -> LoadReport:
    load = driver.engine.load()
    return LoadReport(
        active_blocks=load.active_blocks,
        total_blocks=load.total_blocks,
        prefill_tokens=load.prefill_tokens,
        running_requests=load.running,
        waiting_requests=load.waiting,
        cached_blocks=load.cached_blocks,
        prompt_tokens_total=driver.prompt_tokens_total,
        cached_tokens_total=driver.cached_tokens_total,
    )
