"""Converts requests to vLLM's completions with token ids, and its answers to outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from kvrouter.engines.fields import START_OF_VLLM_TRANSFER, VLLM_TRANSFER, engine_salt
from kvrouter.engines.servers.api import EngineCall, TokenId, finish_reason
from kvrouter.engines.servers.description import EngineDescription
from kvrouter.engines.servers.failures import Answer, EngineFailed, is_given, read_answer
from kvrouter.engines.servers.http import as_json
from kvrouter.engines.servers.json_options import (
    engine_options,
    json_schema,
    no_constraint,
    sampling,
    transfer_parameters,
)
from kvrouter.v1 import worker_pb2 as pb
from kvrouter.v1.common_pb2 import Stage

_PATH = "/v1/completions"
_SAMPLING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed")

_ID_PREFIX = "token_id:"


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    token_ids: list[TokenId] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: TokenId | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(Answer):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Answer).decode


def call(request: pb.WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
    """Returns a request as a completion. A prefill is not streamed, because only then its parameters are returned.

    Raises:
        RequestRefused: the engine cannot serve it.
    """
    is_prefill = request.stage == Stage.STAGE_PREFILL
    body = engine_options(request.sampling_options, "vllm")
    body |= _sampling(request)
    body |= {
        "model": request.scope.lora_name or engine.model,
        "prompt": list(request.token_ids),
        "add_special_tokens": False,
        "stream": not is_prefill,
        "return_token_ids": True,
        "request_id": request.request_id,
    }
    if not is_prefill:
        body["stream_options"] = {"include_usage": True}
    if request.priority:
        body["priority"] = request.priority
    if salt := engine_salt(request.scope):
        body["cache_salt"] = salt
    transfer = _transfer(request, is_prefill=is_prefill)
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    headers = {"X-data-parallel-rank": str(request.dp_rank)} if len(engine.ranks) > 1 else {}
    return EngineCall(_PATH, as_json(body), CompletionReader(), headers)


def _sampling(request: pb.WorkerServiceGenerateRequest) -> dict[str, Any]:
    options = request.sampling_options
    body = sampling(request, _SAMPLING, max_tokens="max_tokens", min_tokens="min_tokens")
    if options.logprobs:
        body["logprobs"] = options.logprobs - 1
        # Otherwise the alternatives have texts, of which several tokens may have the same.
        body["return_tokens_as_token_ids"] = True
    if "structured_output" in options:
        body["structured_outputs"] = _structured_output(options.structured_output)
    return body


def _structured_output(constraint: pb.StructuredOutput) -> dict[str, Any]:
    match constraint.WhichOneof("constraint"):
        case "json_schema":
            return {"json": json_schema(constraint)}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": constraint.regex}
        case "choice":
            return {"choice": list(constraint.choice.texts)}
        case "grammar":
            return {"grammar": constraint.grammar}
    raise no_constraint()


def _transfer(request: pb.WorkerServiceGenerateRequest, *, is_prefill: bool) -> dict[str, Any] | None:
    if "transfer_params" not in request:
        return dict(START_OF_VLLM_TRANSFER) if is_prefill else None
    parameters = transfer_parameters(request, VLLM_TRANSFER)
    return START_OF_VLLM_TRANSFER | parameters if is_prefill else parameters


class CompletionReader:
    """Reads the answer to a completion, streamed or whole.

    The number of cached tokens follows the last token, so the last output is kept until it or the end has come.
    """

    def __init__(self) -> None:
        self._last: pb.GenerateOutput | None = None
        self._cached_tokens: int | None = None
        self._ended = False

    def read(self, data: bytes) -> Iterator[pb.GenerateOutput]:
        """Yields the outputs of one event, or of a whole answer.

        Raises:
            RequestRefused: it reports an error, or is malformed.
        """
        answer = read_answer(_decode, data)
        if answer.usage is not None and answer.usage.prompt_tokens_details is not None:
            self._cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
        for choice in answer.choices:
            if self._last is not None or self._ended:
                raise EngineFailed("the engine sent output after the end of the request")
            output = _output(choice)
            if output is None:
                continue
            if output.finish_reason:
                self._last = output
            else:
                yield output
        if self._last is not None and is_given(answer.kv_transfer_params):
            parameters = pb.TransferParams(format=VLLM_TRANSFER, payload=bytes(answer.kv_transfer_params))
            self._last.transfer_params.CopyFrom(parameters)

    def end(self) -> Iterator[pb.GenerateOutput]:
        """Yields the last output.

        Raises:
            RequestRefused: there is none.
        """
        if self._ended:
            return
        if self._last is None:
            raise EngineFailed("the engine ended its answer before the request was finished")
        self._ended = True
        last, self._last = self._last, None
        if self._cached_tokens is not None:
            last.cached_tokens = self._cached_tokens
        yield last


def _output(choice: _Choice) -> pb.GenerateOutput | None:
    """Returns the output of a choice; None if it has neither tokens nor an end."""
    if choice.token_ids is None and choice.text:
        raise EngineFailed("the engine returns text without token ids: use a vLLM that knows return_token_ids")
    tokens = choice.token_ids or []
    finish = finish_reason(choice.finish_reason) if choice.finish_reason else None
    if not tokens and finish is None:
        return None
    output = pb.GenerateOutput(token_ids=tokens, finish_reason=finish)
    if choice.logprobs is not None and choice.logprobs.token_logprobs:
        output.logprobs.extend(each or 0.0 for each in choice.logprobs.token_logprobs)
        output.top_logprobs.extend(_top(each or {}) for each in choice.logprobs.top_logprobs or ())
    return output


def _top(alternatives: dict[str, float]) -> pb.TopLogprobs:
    """Returns alternatives whose tokens are written as ``token_id:ID``, in descending order."""
    found = pb.TopLogprobs()
    for token, logprob in sorted(alternatives.items(), key=lambda item: -item[1]):
        token_id = token.removeprefix(_ID_PREFIX)
        if token_id.isdigit() and int(token_id) < 1 << 32:
            found.token_ids.append(int(token_id))
            found.logprobs.append(logprob)
    return found
