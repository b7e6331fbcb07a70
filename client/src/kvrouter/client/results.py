"""Results of calls, and the output of a running request."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypedDict

from kvrouter.v1.common_pb2 import PotentialLoad as LoadMessage, RankState
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateResponse, Model as ModelMessage, RoutingInfo, Selection
from kvrouter.v1.worker_pb2 import FinishReason as FinishMessage


class FinishReason(enum.StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True)
class Routing:
    """How a request was routed."""

    request_id: str
    """Id of the request, as sent or generated."""
    worker_id: int
    """The worker of the request."""
    dp_rank: int
    """Its data-parallel rank."""
    attempt: int
    """Number of the attempt, from 0."""
    overlap_blocks: int
    """Predicted overlap: leading blocks of the prompt the rank has in device memory."""
    prompt_blocks: int
    """Number of full blocks of the prompt."""
    mode: str
    """The policy behind the choice."""
    load_only: bool
    """Whether no Indexer answered in time, so the choice rests on load alone."""
    router_seconds: float
    """Time from the request's arrival at the router to its dispatch, seconds."""
    decision_id: int
    """Id of the decision for `kvrouter explain`."""
    ignored_overrides: tuple[str, ...]
    """Names of the request's overrides without effect in its mode."""


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of the output."""

    token_ids: list[int]
    """Token ids since the previous piece."""
    text: str
    """Their text, if it was requested."""
    finish_reason: FinishReason | None
    """Why the generation ended; set in the last piece."""
    cached_tokens: int | None
    """Prompt tokens found in the prefix cache; None if this piece does not say it."""
    logprobs: list[float]
    """Log probabilities of the tokens, if requested."""
    routing: Routing | None
    """How the request was routed; set in the first piece of each attempt."""


@dataclass(frozen=True, slots=True)
class BestWorker:
    """The worker a request would go to. Unpacks to ``(worker_id, dp_rank, overlap_blocks)``."""

    worker_id: int
    dp_rank: int
    overlap_blocks: int
    """Leading blocks of the prompt the rank has in device memory."""
    endpoint: str
    """Address of its WorkerService, host:port."""
    prompt_blocks: int
    """Number of full blocks of the prompt."""
    load_only: bool
    """Whether no Indexer answered in time."""
    decision_id: int
    """Id of the decision for `kvrouter explain`."""

    def __iter__(self) -> Iterator[int]:
        """Yields worker id, rank and overlap."""
        return iter((self.worker_id, self.dp_rank, self.overlap_blocks))


class PotentialLoad(TypedDict):
    """The load a rank would have with a request."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    """Prefill tokens booked and not computed, plus those of the request outside of its overlap."""
    potential_decode_blocks: int
    """Active blocks of the rank, with those of the request."""
    overlap_blocks: int
    """Leading blocks of the request the rank holds in device memory."""
    active_requests: int
    """Number of requests booked on the rank."""
    busy: bool
    """Whether the rank is above a busy threshold."""


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    name: str
    component: str
    """Its component, namespace/name."""
    block_size: int
    """Tokens per block."""
    workers: int
    """Number of live workers."""
    max_model_len: int | None
    """Maximum number of prompt and output tokens together; None for no limit."""
    lora_names: tuple[str, ...]
    """LoRA adapters of at least one worker."""


_FINISH_REASONS = {
    FinishMessage.FINISH_REASON_STOP: FinishReason.STOP,
    FinishMessage.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    FinishMessage.FINISH_REASON_ABORT: FinishReason.ABORT,
    FinishMessage.FINISH_REASON_ERROR: FinishReason.ERROR,
    FinishMessage.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    FinishMessage.FINISH_REASON_CONTENT_FILTER: FinishReason.CONTENT_FILTER,
}


def output_of(response: FrontendServiceGenerateResponse) -> Output:
    """Returns a piece of the output."""
    piece = response.output
    return Output(
        token_ids=list(piece.token_ids),
        text=piece.text,
        finish_reason=_FINISH_REASONS.get(piece.finish_reason),
        cached_tokens=piece.cached_tokens if "cached_tokens" in piece else None,
        logprobs=list(piece.logprobs),
        routing=_routing_of(response.routing) if "routing" in response else None,
    )


def best_worker_of(selection: Selection) -> BestWorker:
    """Returns a choice."""
    return BestWorker(
        worker_id=selection.rank.worker_id,
        dp_rank=selection.rank.dp_rank,
        overlap_blocks=selection.overlap_blocks,
        endpoint=selection.endpoint,
        prompt_blocks=selection.prompt_blocks,
        load_only=selection.load_only,
        decision_id=selection.decision_id,
    )


def potential_load_of(load: LoadMessage) -> PotentialLoad:
    """Returns the load of one rank."""
    return PotentialLoad(
        worker_id=load.rank.worker_id,
        dp_rank=load.rank.dp_rank,
        potential_prefill_tokens=load.potential_prefill_tokens,
        potential_decode_blocks=load.potential_decode_blocks,
        overlap_blocks=load.overlap_blocks,
        active_requests=load.active_requests,
        busy=load.busy,
    )


def model_of(model: ModelMessage) -> Model:
    """Returns a served model."""
    return Model(
        name=model.name,
        component=f"{model.component.namespace}/{model.component.name}",
        block_size=model.block_size,
        workers=model.workers,
        max_model_len=model.max_model_len or None,
        lora_names=tuple(model.lora_names),
    )


def _routing_of(info: RoutingInfo) -> Routing:
    return Routing(
        request_id=info.request_id,
        worker_id=info.rank.worker_id,
        dp_rank=info.rank.dp_rank,
        attempt=info.attempt,
        overlap_blocks=info.predicted_overlap_blocks,
        prompt_blocks=info.prompt_blocks,
        mode=info.mode,
        load_only=info.load_only,
        router_seconds=info.router_us / 1e6,
        decision_id=info.decision_id,
        ignored_overrides=tuple(info.ignored_overrides),
    )


def rank_events(state: RankState) -> list[dict[str, Any]]:
    """Returns one stored event for each block of a part of a rank's state, parents before children."""
    return [
        {
            "worker_id": state.rank.worker_id,
            "event": {
                "event_id": number,
                "data": {
                    "stored": {
                        "parent_hash": block.parent_engine_hash if "parent_engine_hash" in block else None,
                        "blocks": [{"block_hash": block.engine_hash, "tokens_hash": block.local_hash}],
                    }
                },
                "dp_rank": state.rank.dp_rank,
            },
        }
        for number, block in enumerate(state.blocks)
    ]


class Generation(AsyncIterator[Output]):
    """The output of a request, piece by piece. Closing it before its end cancels the request.

    It is an async iterator, and a context manager.
    """

    def __init__(self, responses: AsyncGenerator[FrontendServiceGenerateResponse, None], first: Output) -> None:
        """``first`` is the piece before those of ``responses``."""
        self._responses = responses
        self._first: Output | None = first
        self._routing = first.routing

    @property
    def routing(self) -> Routing:
        """How the request was routed; after a retry, how its last attempt was."""
        assert self._routing is not None  # noqa: S101 - the contract: each first piece has it
        return self._routing

    async def __anext__(self) -> Output:
        """Returns the next piece.

        Raises:
            KvRouterError: the request failed.
        """
        output, self._first = self._first, None
        if output is None:
            output = output_of(await anext(self._responses))
        self._routing = output.routing or self._routing
        return output

    async def tokens(self) -> list[int]:
        """Returns all token ids left.

        Raises:
            KvRouterError: the request failed.
        """
        return [token async for output in self for token in output.token_ids]

    async def aclose(self) -> None:
        """Ends the request, if it has not ended."""
        self._first = None
        await self._responses.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
