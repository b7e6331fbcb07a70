"""Checks requests before anything is booked or sent for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvrouter.core import TokenBuffer, first_token_outside
from kvrouter.engines.openai_server import is_openai_server
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, GenerateRequest, Sampling, StopRules
from kvrouter.frontend.request.model_pools import structured_workers
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.requests import check_prompt_length, check_request_id, longest_prompt
from kvrouter.v1.common_pb2 import RoutingOverrides, RoutingRequest
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.registry_pb2 import WorkerRegistration

MAX_REQUEST_ID_BYTES = 112
"""The rest of a booking id's 128 bytes holds the suffix making it unique."""
MAX_MIGRATIONS = 16
"""Maximum migration limit of a request."""
_NO_WORKER = WorkerRegistration()


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one request."""

    max_prompt_tokens: int
    """Maximum number of prompt tokens, whatever the model allows."""
    max_output_tokens: int
    """Maximum number of tokens to generate."""


@contextmanager
def prompt_limit(views: Sequence[ComponentView], limits: Limits) -> Iterator[int]:
    """Yields the maximum number of tokens with which a pool of the model can run a prompt, to tokenize it within.

    Args:
        views: The pools, at least one. Those without live workers count only if none has any.
        limits: Limits of a request.

    Raises:
        PromptTooLong: the tokenizer found more tokens; the error has the context length if that is the limit.
    """
    lengths = [view.max_model_len for view in views if view.workers] or [view.max_model_len for view in views]
    limit = longest_prompt(max(lengths) if all(lengths) else 0, limits.max_prompt_tokens)
    try:
        yield limit
    except PromptTooLong as error:
        if limit == limits.max_prompt_tokens:
            raise
        raise PromptTooLong.for_model(error.tokens, limit + 1, field=error.info.field) from None


def check_request(request: GenerateRequest, tokens: int, view: ComponentView, limits: Limits) -> None:
    """Checks a generation request whose prompt has that many tokens.

    Raises:
        BadRequest: a field is missing or out of range; the error names the field.
        PromptTooLong: the prompt, or the prompt with its ``max_tokens``, exceeds a limit.
    """
    check_request_id(request.request_id, MAX_REQUEST_ID_BYTES, "request_id")
    if tokens == 0:
        raise BadRequest("the prompt is empty", field="token_ids", advice="Send at least one token id.")
    if is_openai_server(next(iter(view.workers.values()), _NO_WORKER)):
        raise BadRequest(
            f"the workers of model {view.model!r} have only an OpenAI API",
            field="model",
            advice="Send the request to the Frontend's HTTP API.",
        )
    longest, max_tokens = view.max_model_len, request.stop.max_tokens
    check_prompt_length(tokens, longest, limits.max_prompt_tokens)
    _check_stop(request.stop, limits)
    if longest and tokens + max_tokens > longest:
        raise PromptTooLong.for_model(tokens, longest, field="stop_conditions.max_tokens", output_tokens=max_tokens)
    if request.sampling != DEFAULT_SAMPLING:
        _check_sampling(request.sampling)
    if (migrations := request.migration_limit or 0) > MAX_MIGRATIONS:
        advice = f"Set migration_limit to at most {MAX_MIGRATIONS}."
        raise _out_of_range("migration_limit", migrations, advice)
    if request.overrides is not None:
        check_overrides(request.overrides)
    if request.sampling.structured_output is not None:
        structured_workers(view)


def check_vocabulary(token_ids: TokenBuffer, vocabulary: int, field: str) -> None:
    """Checks that a model has the token ids of a request: an engine may not survive others.

    Args:
        token_ids: Packed token ids.
        vocabulary: Number of token ids the model has; 0 if it is not known.
        field: Field of the request with the token ids, for the error.

    Raises:
        BadRequest: it has not; the error has the position of the first one.
    """
    if vocabulary and (index := first_token_outside(token_ids, vocabulary)) is not None:
        path = f"{field}.{index}"
        raise BadRequest(
            f"{path}: the model has no such token",
            field=path,
            advice=f"Send token ids from 0 to {vocabulary - 1}, those of the model's tokenizer.",
        )


def check_routing(request: RoutingRequest, limits: Limits) -> None:
    """Checks a routing request, as far as it does not depend on the component.

    Raises:
        BadRequest: an override is out of range.
        PromptTooLong: there are more tokens or hashes than a prompt may have tokens, and they were counted.
    """
    check_overrides(request.overrides)
    token_ids, hashes = len(request.token_ids.ids), len(request.local_hashes.hashes)
    tokens = max(request.prompt_tokens, token_ids, hashes)
    if tokens > limits.max_prompt_tokens and not request.length_is_estimated:
        raise PromptTooLong(tokens, limits.max_prompt_tokens, field="token_ids" if token_ids else "local_hashes")


def requested_tokens(request: RoutingRequest) -> int:
    """Returns the prompt tokens of a routing request, of whole blocks where only hashes tell their number."""
    hashed = len(request.local_hashes.hashes) * request.block_size
    return max(request.prompt_tokens, len(request.token_ids.ids), hashed)


def check_overrides(overrides: RoutingOverrides) -> None:
    """Checks routing options that apply to every policy.

    Raises:
        BadRequest: a number is negative, not finite, or above its range.
    """
    _at_least_zero(overrides.overlap_score_weight, "overrides.overlap_score_weight")
    _at_least_zero(overrides.router_temperature, "overrides.router_temperature")
    threshold = overrides.active_decode_blocks_threshold
    if not 0 <= threshold <= 1:
        raise _out_of_range("overrides.active_decode_blocks_threshold", threshold, "Send a share between 0 and 1.")


def _check_stop(stop: StopRules, limits: Limits) -> None:
    max_tokens = stop.max_tokens
    if not 1 <= max_tokens <= limits.max_output_tokens:
        advice = f"Set max_tokens to a value from 1 to {limits.max_output_tokens}."
        raise _out_of_range("stop_conditions.max_tokens", max_tokens, advice)
    if stop.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens {stop.min_tokens} exceeds max_tokens {max_tokens}",
            field="stop_conditions.min_tokens",
            advice="Set min_tokens to at most max_tokens.",
        )
    if stop.stop:
        raise BadRequest(
            "stop strings need the output as text",
            field="stop_conditions.stop",
            advice="Set return_text, or send stop_token_ids instead.",
        )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature is not None:
        _at_least_zero(sampling.temperature, "sampling_options.temperature")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        raise _out_of_range("sampling_options.top_p", sampling.top_p, "Send a number above 0 and up to 1.")
    if sampling.min_p is not None and not 0 <= sampling.min_p <= 1:
        raise _out_of_range("sampling_options.min_p", sampling.min_p, "Send a number between 0 and 1.")
    if sampling.n is not None and sampling.n != 1:
        raise _out_of_range("sampling_options.n", sampling.n, "Send one request for each sequence.")


def _out_of_range(field: str, value: float, advice: str) -> BadRequest:
    return BadRequest(f"{field.rpartition('.')[2]} is {value}", field=field, advice=advice)


def _at_least_zero(value: float, field: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise BadRequest(f"{field} is {value}", field=field, advice="Send a finite number, 0 or more.")
