"""Converts requests to SGLang's generate with token ids, and its answers to outputs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any

import msgspec
from kvrouter.engines.fields import SGLANG_TRANSFER, engine_salt
from kvrouter.engines.servers.api import EngineCall, TokenId, finish_reason
from kvrouter.engines.servers.description import EngineDescription
from kvrouter.engines.servers.failures import Answer, EngineFailed, read_answer, refusal_of_code
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

_PATH = "/generate"
_SAMPLING = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_ID_BYTES = 16
_META = re.compile(r"[\\.^$|?*+()\[\]{}]")
"""Characters with a meaning in regular expressions."""


class _Finish(msgspec.Struct):
    type: str = ""
    message: str | None = None
    status_code: int | None = None


class _CachedTokens(msgspec.Struct):
    """Cached tokens by tier: a part of them is loaded from host memory, or from the storage behind it."""

    host: TokenId | None = None
    storage: TokenId | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | str | None = None
    completion_tokens: int | None = None
    cached_tokens: TokenId | None = None
    cached_tokens_details: _CachedTokens | None = None
    output_token_logprobs: list[list[Any]] | None = None
    output_top_logprobs: list[list[list[Any]] | None] | None = None


class _Answer(Answer):
    output_ids: list[TokenId] | None = None
    text: str | None = None
    meta_info: _Meta = msgspec.field(default_factory=_Meta)


_decode = msgspec.json.Decoder(_Answer).decode


def call(request: pb.WorkerServiceGenerateRequest, engine: EngineDescription) -> EngineCall:
    """Returns a request as one for SGLang.

    Raises:
        RequestRefused: the engine cannot serve it.
    """
    # SGLang aborts all requests whose ids begin with the given one, so ids have one length.
    engine_id = secrets.token_hex(_ID_BYTES)
    body: dict[str, Any] = {
        "rid": engine_id,
        "input_ids": list(request.token_ids),
        "sampling_params": engine_options(request.sampling_options, "sglang") | _sampling(request),
        "stream": True,
    }
    if request.sampling_options.logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": request.sampling_options.logprobs - 1}
    if len(engine.ranks) > 1:
        body["routed_dp_rank"] = request.dp_rank
    if request.priority:
        body["priority"] = request.priority if engine.smaller_priority_first else -request.priority
    if request.scope.lora_name:
        body["lora_path"] = request.scope.lora_name
    if salt := engine_salt(request.scope):
        body |= {"cache_salt": salt, "extra_key": salt}  # older releases know extra_key only
    transfer = _transfer(request, engine)
    early = None
    if transfer is not None:
        body |= transfer
        if request.stage == Stage.STAGE_PREFILL:
            early = pb.GenerateOutput(
                transfer_params=pb.TransferParams(format=SGLANG_TRANSFER, payload=as_json(transfer))
            )
    return EngineCall(_PATH, as_json(body), GenerateReader(), engine_id=engine_id, early=early)


def _sampling(request: pb.WorkerServiceGenerateRequest) -> dict[str, Any]:
    options = request.sampling_options
    parameters = sampling(request, _SAMPLING, max_tokens="max_new_tokens", min_tokens="min_new_tokens")
    if "seed" in options:
        parameters["sampling_seed"] = options.seed
    if "structured_output" in options:
        parameters |= _structured_output(options.structured_output)
    return parameters


def _transfer(request: pb.WorkerServiceGenerateRequest, engine: EngineDescription) -> dict[str, Any] | None:
    """Returns where prefill and decode meet. A prefill without parameters draws a room at the engine's own address."""
    if "transfer_params" in request:
        return transfer_parameters(request, SGLANG_TRANSFER)
    if request.stage != Stage.STAGE_PREFILL or not engine.bootstrap_endpoint:
        return None
    host, _, port = engine.bootstrap_endpoint.rpartition(":")
    return {"bootstrap_host": host.strip("[]"), "bootstrap_port": int(port), "bootstrap_room": secrets.randbits(63)}


class GenerateReader:
    """Reads the answer to a generate request.

    The token ids of an event are all so far, or those since the last event if the server streams incrementally. Its
    number of tokens tells which.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._has_cached_tokens = False
        self._ended = False

    def read(self, data: bytes) -> Iterator[pb.GenerateOutput]:
        """Yields the outputs of one event, or of a whole answer.

        Raises:
            RequestRefused: it reports an error, or is malformed.
        """
        answer = read_answer(_decode, data)
        if self._ended:
            raise EngineFailed("the engine sent output after the end of the request")
        if answer.output_ids is None and answer.text:
            raise EngineFailed("the engine returns text without token ids: use an SGLang that returns output_ids")
        finish = _finish(answer.meta_info.finish_reason)
        tokens, first = self._new(answer.output_ids or [], answer.meta_info.completion_tokens)
        if not tokens and finish is None:
            return
        output = pb.GenerateOutput(token_ids=tokens, finish_reason=finish)
        if answer.meta_info.cached_tokens is not None and not self._has_cached_tokens:
            self._has_cached_tokens = True
            output.cached_tokens = answer.meta_info.cached_tokens
            by_tier = answer.meta_info.cached_tokens_details
            if by_tier is not None and (by_tier.host or by_tier.storage):
                output.lower_cached_tokens.host = by_tier.host or 0
                output.lower_cached_tokens.shared = by_tier.storage or 0
        if answer.meta_info.output_token_logprobs:
            output.logprobs.extend(_logprobs(answer.meta_info.output_token_logprobs[first:]))
        if answer.meta_info.output_top_logprobs:
            output.top_logprobs.extend(map(_top, answer.meta_info.output_top_logprobs[first:]))
        self._ended = finish is not None
        yield output

    def end(self) -> Iterator[pb.GenerateOutput]:
        """Yields nothing: the last output was complete.

        Raises:
            RequestRefused: there was none.
        """
        if not self._ended:
            raise EngineFailed("the engine ended its answer before the request was finished")
        yield from ()

    def _new(self, tokens: list[int], completed: int | None) -> tuple[list[int], int]:
        """Returns the tokens that are new, and where the first one is among those of the event."""
        is_incremental = len(tokens) < self._tokens or (
            completed == self._tokens + len(tokens) and completed != len(tokens)
        )
        first = 0 if is_incremental else self._tokens
        self._tokens += len(tokens) - first
        return tokens[first:], first


def _finish(reason: _Finish | str | None) -> pb.FinishReason | None:
    """Returns why the generation ended, None if it has not.

    Raises:
        RequestRefused: the engine aborted it because of an error.
    """
    if reason is None:
        return None
    if isinstance(reason, str):
        return finish_reason(reason)
    if reason.type == "abort" and reason.status_code is not None and reason.status_code >= 400:
        raise refusal_of_code(reason.status_code, reason.message or "no message")
    return finish_reason(reason.type)


def _top(entries: list[list[Any]] | None) -> pb.TopLogprobs:
    """Returns the alternatives of a token, which are [log probability, token id, text]."""
    found = pb.TopLogprobs()
    for logprob, token_id, *_ in entries or ():
        if isinstance(logprob, int | float) and isinstance(token_id, int) and 0 <= token_id < 1 << 32:
            found.token_ids.append(token_id)
            found.logprobs.append(logprob)
    return found


def _escaped(text: str) -> str:
    """Returns a regular expression for a text. Unlike ``re.escape``, it uses only escapes that every library knows."""
    return _META.sub(r"\\\g<0>", text)


def _structured_output(constraint: pb.StructuredOutput) -> dict[str, Any]:
    match constraint.WhichOneof("constraint"):
        case "json_schema":
            return {"json_schema": msgspec.json.encode(json_schema(constraint)).decode()}
        case "json_object":
            return {"json_schema": '{"type":"object"}'}
        case "regex":
            return {"regex": constraint.regex}
        case "choice":
            return {"regex": "|".join(f"({_escaped(text)})" for text in constraint.choice.texts)}
        case "grammar":
            return {"ebnf": constraint.grammar}
    raise no_constraint()


def _logprobs(entries: list[list[Any]]) -> Iterator[float]:
    for entry in entries:
        yield float(entry[0]) if entry and isinstance(entry[0], int | float) else 0.0
