"""Common fields of completions and chats, and the headers that stand in their place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeAlias

import msgspec
from aiohttp import web
from kvrouter.frontend.edge.json_body import check_uint64, invalid
from kvrouter.frontend.edge.structured_output import GUIDED, read_structured_output
from kvrouter.frontend.edge.token_list import TokenId
from kvrouter.frontend.request.conversation_ids import ConversationIds
from kvrouter.frontend.request.current_choice import chosen_model
from kvrouter.frontend.request.request_checks import MAX_REQUEST_ID_BYTES
from kvrouter.runtime.requests import check_request_id
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.worker_pb2 import StructuredOutput

UInt32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
UInt64 = Annotated[int, msgspec.Meta(ge=0)]
"""``check_uint64`` checks the upper bound, which msgspec cannot."""

RANK_HEADER = "x-data-parallel-rank"
"""Header by which vLLM runs a request on a certain data-parallel rank."""

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID: ContextVar[str] = ContextVar("kvrouter_request_id", default="")
_CONVERSATION: ContextVar[str | None] = ContextVar("kvrouter_conversation", default=None)

MAX_SEQUENCES = 128
"""Maximum number of prompts times sequences of one request."""
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit, and vLLM's default."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024

_numbers = attrgetter("n", "seed", "worker_id", "router_config_override")
_NO_NUMBERS = (None,) * 4
_CONSTRAINTS_OF_OUTPUT = (*GUIDED, "structured_outputs", "response_format")
_UNCONSTRAINED = (None,) * len(_CONSTRAINTS_OF_OUTPUT)
_constraints = attrgetter(*_CONSTRAINTS_OF_OUTPUT)
_EMPTY: tuple[object, ...] = ("", [], {})
_UNSUPPORTED = "Leave it out: workers that receive tokens do not support it."

Constraint: TypeAlias = tuple[str, StructuredOutput]
"""The field that constrains the output, and its constraint."""
OnlyDefault = Annotated[Any, msgspec.Meta(description="accepted at its default only")]
"""Type of a field no worker that receives tokens could obey: its default, null and empty lists are accepted."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a stream besides tokens."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI's padding of chunks, which their servers add by default. Streams here have none."""
    continuous_usage_stats: bool | None = None


class RouterConfigOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Routing options of one request."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    mode: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: UInt64 | None = None


class SharedFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of chats and completions: OpenAI's, vLLM's and our own. None stands for the default."""

    model: str
    min_tokens: UInt32 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: UInt64 | None = None
    n: UInt32 | None = None
    request_id: str | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    conversation_id: str | None = None
    expected_output_tokens: UInt32 | None = None
    return_token_ids: bool | None = None
    worker_id: UInt64 | None = None
    dp_rank: UInt32 | None = None
    migration_limit: UInt32 | None = None
    router_config_override: RouterConfigOverride | None = None
    # Of the client's business only.
    user: str | None = None
    metadata: dict[str, str | None] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Hints to OpenAI's own servers, which change no output.
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    # Constraints of the output.
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    # Of OpenAI and vLLM, with their defaults.
    allowed_token_ids: OnlyDefault = None
    bad_words: OnlyDefault = None
    early_stopping: OnlyDefault = False
    ec_transfer_params: OnlyDefault = None
    guided_decoding_backend: OnlyDefault = None
    guided_whitespace_pattern: OnlyDefault = None
    kv_transfer_params: OnlyDefault = None
    length_penalty: OnlyDefault = 1.0
    logit_bias: OnlyDefault = None
    logits_processors: OnlyDefault = None
    logprob_token_ids: OnlyDefault = None
    mm_payload: OnlyDefault = "tensors"
    prompt_logprobs: OnlyDefault = None
    repetition_detection: OnlyDefault = None
    return_mm_kwargs: OnlyDefault = False
    return_token_offsets: OnlyDefault = False
    return_tokens_as_token_ids: OnlyDefault = False
    return_weight_versions: OnlyDefault = False
    routed_experts_prompt_start: OnlyDefault = 0
    session_id: OnlyDefault = None
    spaces_between_special_tokens: OnlyDefault = True
    stream_interval: OnlyDefault = None
    thinking_token_budget: OnlyDefault = None
    truncate_prompt_tokens: OnlyDefault = None
    truncation_side: OnlyDefault = None
    use_beam_search: OnlyDefault = False
    vllm_xargs: OnlyDefault = None
    watermarking: OnlyDefault = False

    def stop_strings(self) -> tuple[str, ...]:
        """Returns the stop strings.

        Raises:
            BadRequest: one is empty, or they are too many or too long.
        """
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > MAX_STOP_STRINGS or any(not 1 <= len(each) <= MAX_STOP_CHARACTERS for each in stop):
            raise invalid(
                "stop",
                f"expected at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters",
                "Send fewer or shorter stop strings.",
            )
        return stop

    def check(self, prompts: int) -> Constraint | None:
        """Checks values beyond the decoder's checks. Returns what constrains the output; None if nothing does.

        Raises:
            BadRequest: a field is out of range or not supported.
        """
        if prompts != 1 or _numbers(self) != _NO_NUMBERS:
            self._check_numbers(prompts)
        if self.stop is not None:
            self.stop_strings()
        check_defaults(self)
        if (options := self.stream_options) is not None:
            if not self.stream:
                raise invalid("stream_options", "stream is not true", "Set stream, or leave it out.")
            if options.continuous_usage_stats:
                raise unsupported("stream_options.continuous_usage_stats")
        return self.structured_output()

    def _check_numbers(self, prompts: int) -> None:
        numbers = {"seed": self.seed, "worker_id": self.worker_id}
        if (override := self.router_config_override) is not None:
            threshold = "active_prefill_tokens_threshold"
            numbers[f"router_config_override.{threshold}"] = override.active_prefill_tokens_threshold
        check_uint64(numbers)
        sequences = 1 if self.n is None else self.n
        if not 1 <= sequences * prompts <= MAX_SEQUENCES or sequences < 1:
            raise invalid(
                "n",
                f"expected 1 to {MAX_SEQUENCES // max(1, prompts)} sequences for each of {prompts} prompts, "
                f"received {sequences}",
                "Send fewer prompts, or a smaller n.",
            )

    def structured_output(self) -> Constraint | None:
        """Returns what constrains the output; None if nothing does.

        Raises:
            BadRequest: it is malformed, or there are several.
        """
        if (given := _constraints(self)) == _UNCONSTRAINED:
            return None
        return read_structured_output(dict(zip(_CONSTRAINTS_OF_OUTPUT, given, strict=True)))


def add_headers(fields: SharedFields, request: web.BaseRequest, conversations: ConversationIds) -> None:
    """Adds to fields what headers say: ``x-request-id``, ``x-data-parallel-rank`` as for vLLM, the conversation.

    Fields of the body take precedence. Without an id the request gets a generated one. The model is that which was
    chosen for the client's name.

    Raises:
        BadRequest: an id has control characters or is not UTF-8, or a rank is not a number.
    """
    if fields.request_id:
        check_request_id(fields.request_id, MAX_REQUEST_ID_BYTES, "request_id")
        _REQUEST_ID.set(fields.request_id)  # An error names it too.
    fields.model = chosen_model(fields.model)
    request_id = checked_request_id(request)
    fields.request_id = fields.request_id or request_id
    rank = requested_rank(request.headers)
    if fields.dp_rank is None:
        fields.dp_rank = rank
    fields.conversation_id = conversation_of(request, conversations, fields.conversation_id, fields.prompt_cache_key)


def conversation_of(
    request: web.BaseRequest, conversations: ConversationIds, conversation_id: str | None, prompt_cache_key: str | None
) -> str:
    """Returns the conversation of a request: that of its headers and fields, unless it is known already."""
    if (known := _CONVERSATION.get()) is not None:
        return known
    return conversations.of(request.headers, conversation_id=conversation_id, prompt_cache_key=prompt_cache_key)


@contextmanager
def in_conversation(conversation: str) -> Iterator[None]:
    """Makes a conversation known to this task while the context lasts, so that an invalid id is counted once."""
    token = _CONVERSATION.set(conversation)
    try:
        yield
    finally:
        _CONVERSATION.reset(token)


def requested_id(headers: Mapping[str, str]) -> str:
    """Returns the id a client chose for its request, in ``x-request-id``; empty if it chose none.

    Raises:
        BadRequest: it has control characters or is not UTF-8, or it is too long.
    """
    request_id = headers.get(REQUEST_ID_HEADER, "")
    if request_id:
        check_request_id(request_id, MAX_REQUEST_ID_BYTES, REQUEST_ID_HEADER)
    return request_id


def request_id_of(request: web.BaseRequest) -> str:
    """Returns the id of a request: the client's if it is valid, or else a generated one."""
    try:
        return checked_request_id(request)
    except BadRequest:
        return _REQUEST_ID.get() or os.urandom(16).hex()


def checked_request_id(request: web.BaseRequest) -> str:
    """Returns the id of a request, which it notes in its task: the client's, or a generated one.

    Raises:
        BadRequest: the client's is invalid.
    """
    requested = requested_id(request.headers)
    if not (noted := _REQUEST_ID.get()):
        noted = requested or os.urandom(16).hex()
        _REQUEST_ID.set(noted)
    return noted


def requested_rank(headers: Mapping[str, str]) -> int | None:
    """Returns the data-parallel rank a client names as for vLLM, in ``x-data-parallel-rank``; None for any.

    Raises:
        BadRequest: it is not a number.
    """
    rank = headers.get(RANK_HEADER)
    if rank is None:
        return None
    if not (rank.isascii() and rank.isdigit() and int(rank) < 1 << 32):
        raise invalid(
            RANK_HEADER, f"expected a number of 32 bits, received {rank[:32]!r}", "Send the number of a rank, from 0."
        )
    return int(rank)


def check_top_logprobs(number: int, field: str) -> None:
    """Checks the number of most likely tokens to return at each place.

    Raises:
        BadRequest: there are too many.
    """
    if number > MAX_TOP_LOGPROBS:
        raise invalid(field, f"expected at most {MAX_TOP_LOGPROBS}, received {number}", "Request fewer.")


def check_defaults(fields: msgspec.Struct) -> None:
    """Checks the fields accepted at their default only.

    Raises:
        BadRequest: one has another value.
    """
    names, defaults, values_of = _defaults(type(fields))
    values = values_of(fields)
    if values == defaults:
        return
    for name, default, value in zip(names, defaults, values, strict=True):
        if value is not None and value != default and value not in _EMPTY:
            raise unsupported(name)


@cache
def _defaults(
    kind: type[msgspec.Struct],
) -> tuple[tuple[str, ...], tuple[object, ...], Callable[[msgspec.Struct], tuple[object, ...]]]:
    """Returns the fields that are accepted at their default only, their defaults, and what reads all of them."""
    fields = [field for field in msgspec.structs.fields(kind) if field.type == OnlyDefault]
    names, defaults = tuple(field.name for field in fields), tuple(field.default for field in fields)
    if len(names) == 1:
        return names, defaults, lambda fields: (getattr(fields, names[0]),)
    return names, defaults, attrgetter(*names)


def unsupported(name: str) -> BadRequest:
    """Returns the error for a field workers here cannot obey."""
    return invalid(name, "not supported by the workers of this model", _UNSUPPORTED)
