"""The shape of ``/v1/completions``: requests in, answers out, as vLLM has them with ``return_token_ids``.

Prompts are token ids, and answers carry token ids: the gateway has no tokenizer.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from kvrouter.frontend.json_body import read_body
from kvrouter.v1.common_pb2 import BlockScope, RoutingConstraints, RoutingOverrides
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, RoutingInfo
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, SamplingOptions, StopConditions
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import ErrorDetails

_FINISH: dict[int, str] = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_ABORT: "abort",
    FinishReason.FINISH_REASON_ERROR: "error",
}

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]


def _advice(error: ErrorDetails) -> str:
    if error["loc"] == ("prompt",) and error["type"] == "list_type":
        return "Send the prompt as a list of token ids; the gateway has no tokenizer."
    return "Correct the field, or leave it out."


class StreamOptions(BaseModel):
    """What a stream carries besides tokens."""

    include_usage: bool = False


class RouterConfigOverride(BaseModel):
    """Changes to the router's settings for one request."""

    model_config = ConfigDict(extra="forbid")

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    mode: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None


class CompletionRequest(BaseModel):
    """Body of a request. Fields that the engine alone understands are refused, not dropped."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: list[TokenId]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 32)] = 16
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    n: Literal[1] = 1
    request_id: str = ""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: str = ""
    conversation_id: str = ""
    user: str | None = None
    return_token_ids: bool = True
    add_special_tokens: bool = False
    worker_id: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    dp_rank: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    router_config_override: RouterConfigOverride = RouterConfigOverride()

    @classmethod
    def parse(cls, body: bytes) -> CompletionRequest:
        """Reads a body.

        Raises:
            BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names it.
        """
        return read_body(cls, body, _advice)

    def to_generate(self) -> FrontendServiceGenerateRequest:
        """The request as the Frontend's contract has it."""
        override = self.router_config_override
        return FrontendServiceGenerateRequest(
            request_id=self.request_id,
            model=self.model,
            token_ids=self.prompt,
            stop_conditions=StopConditions(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
            ),
            sampling_options=SamplingOptions(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                repetition_penalty=self.repetition_penalty,
                seed=self.seed,
            ),
            overrides=RoutingOverrides(
                overlap_score_weight=override.overlap_score_weight,
                router_temperature=override.router_temperature,
                mode=override.mode,
                active_decode_blocks_threshold=override.active_decode_blocks_threshold,
                active_prefill_tokens_threshold=override.active_prefill_tokens_threshold,
            ),
            constraints=RoutingConstraints(worker_id=self.worker_id, dp_rank=self.dp_rank),
            scope=BlockScope(cache_salt=self.cache_salt),
            priority=self.priority,
            conversation_id=self.conversation_id,
        )


class Completion:
    """The answer to one request, gathered or as chunks."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._created = int(time.time())
        self._id = ""
        self._cached_tokens = 0
        self._routing: RoutingInfo | None = None
        self._token_ids: list[int] = []
        self._finish_reason: str | None = None

    def add(self, output: GenerateOutput, routing: RoutingInfo | None) -> dict[str, Any]:
        """Takes a piece in; returns it as a chunk of a stream."""
        if routing is not None:
            self._routing = routing
            self._id = f"cmpl-{routing.request_id}"
        if output.HasField("cached_tokens"):
            self._cached_tokens = output.cached_tokens
        first = not self._token_ids
        token_ids = list(output.token_ids)
        self._token_ids += token_ids
        self._finish_reason = _FINISH.get(output.finish_reason)
        choice = self._choice(token_ids)
        if first and token_ids:
            choice["prompt_token_ids"] = self._request.prompt
        return self._envelope([choice])

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choice = self._choice(self._token_ids)
        choice["prompt_token_ids"] = self._request.prompt
        return {**self._envelope([choice]), "usage": self._usage(), "kvrouter": self._routed()}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that was asked to include usage."""
        return {**self._envelope([]), "usage": self._usage(), "kvrouter": self._routed()}

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }

    def _choice(self, token_ids: list[int]) -> dict[str, Any]:
        return {
            "index": 0,
            "text": "",
            "token_ids": token_ids,
            "logprobs": None,
            "finish_reason": self._finish_reason,
            "stop_reason": None,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = len(self._request.prompt), len(self._token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }

    def _routed(self) -> dict[str, Any] | None:
        routing = self._routing
        if routing is None:
            return None
        return {
            "worker_id": routing.rank.worker_id,
            "dp_rank": routing.rank.dp_rank,
            "predicted_overlap_blocks": routing.predicted_overlap_blocks,
            "prompt_blocks": routing.prompt_blocks,
            "mode": routing.mode,
            "router_us": routing.router_us,
            "held_us": routing.held_us,
        }
