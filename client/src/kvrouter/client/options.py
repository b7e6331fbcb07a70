"""Options of a request besides its prompt, as keyword arguments and dictionaries, and the conversion to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from google.protobuf.message import DecodeError, Message
from kvrouter.v1.common_pb2 import BlockScope, RoutingConstraints, RoutingOverrides, RoutingRequest, TokenIds
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.packed_pb2 import PackedTokenIds
from kvrouter.v1.worker_pb2 import SamplingOptions as SamplingMessage, StopConditions as StopMessage

M = TypeVar("M", bound=Message)
Prompt: TypeAlias = Sequence[int] | bytes | memoryview
"""A prompt: token ids, as a sequence or as a buffer of little-endian uint32."""

DEFAULT_MAX_TOKENS = 16
"""Output tokens of a request without ``max_tokens``, as in the OpenAI API."""


class StopConditions(TypedDict, total=False):
    """When a generation ends."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    stop: Sequence[str]


class SamplingOptions(TypedDict, total=False):
    """How tokens are sampled."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    logprobs: int
    engine_options_json: str


class RouterConfigOverride(TypedDict, total=False):
    """Routing options of one request."""

    overlap_score_weight: float
    router_temperature: float
    mode: str
    active_decode_blocks_threshold: float
    active_prefill_tokens_threshold: int


class Constraints(TypedDict, total=False):
    """Constraints on the ranks of a request."""

    worker_id: int
    dp_rank: int
    allowed_worker_ids: Sequence[int]
    excluded_worker_ids: Sequence[int]
    required_labels: Mapping[str, str]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of every call with a prompt."""

    constraints: Constraints | None
    """Constraints on the ranks of the request."""
    conversation_id: str
    """Conversation, which is routed to the same rank if possible."""
    expected_output_tokens: int
    """Expected number of output tokens; learned from earlier outputs if it is not given."""
    priority: int
    """Priority in queues: a smaller value is served earlier."""
    lora_name: str
    """LoRA adapter."""
    cache_salt: str
    """Salt to isolate the cache."""
    tenant: str
    """Tenant whose cache is isolated."""
    timeout: float | None
    """Deadline of the call, seconds; the client's default if it is not given, none if it is None."""


class RoutingOptions(RequestOptions, total=False):
    """Keyword arguments of every call for routing only."""

    router_config_override: RouterConfigOverride | None
    """Routing options of this request."""
    worker_id: int | None
    """The only permitted worker."""
    dp_rank: int | None
    """The only permitted rank of this worker."""


class OutputOptions(RequestOptions, total=False):
    """Keyword arguments of every generating call."""

    prompt_text: str
    """The prompt as text, instead of token ids."""
    return_text: bool
    """Whether the output is returned as text too."""
    request_id: str | None
    """Id of the request, for logs; generated if it is not given."""
    stop_conditions: StopConditions | None
    """When generation ends; by default after 16 tokens."""
    sampling_options: SamplingOptions | None
    """How tokens are sampled."""
    migration_limit: int | None
    """How often the request may continue on another worker; the Frontend's default if it is not given, 0 for never."""


class GenerateOptions(RoutingOptions, OutputOptions, total=False):
    """Keyword arguments of ``generate``."""


def check_names(options: Mapping[str, object], known: type) -> None:
    """Refuses unknown keyword arguments.

    Raises:
        TypeError: an argument is unknown.
    """
    names: frozenset[str] = known.__optional_keys__  # type: ignore[attr-defined]  # each is a TypedDict
    for name in options.keys() - names:
        raise TypeError(f"unknown option {name!r}: expected one of {', '.join(sorted(names))}")


def generate_request(token_ids: Prompt | None, model: str, options: GenerateOptions) -> FrontendServiceGenerateRequest:
    """Returns the message of a generation request.

    Raises:
        BadRequest: an argument has a wrong type or value.
    """
    check_names(options, GenerateOptions)
    text = options.get("prompt_text", "")
    if token_ids is None and not text:
        raise BadRequest("no prompt was given", field="token_ids", advice="Pass token_ids or prompt_text.")
    if token_ids is not None and text:
        raise BadRequest("token_ids and prompt_text were given", field="prompt_text", advice="Pass one of them.")
    stop = {"max_tokens": DEFAULT_MAX_TOKENS, **_mapping("stop_conditions", options.get("stop_conditions"))}
    return _message(
        FrontendServiceGenerateRequest,
        request_id=options.get("request_id") or "",
        model=_model(model),
        token_ids=None if token_ids is None else _tokens(token_ids),
        stop_conditions=_nested(StopMessage, "stop_conditions", stop),
        sampling_options=_nested(SamplingMessage, "sampling_options", options.get("sampling_options")),
        prompt_text=text or None,
        return_text=options.get("return_text", False),
        migration_limit=options.get("migration_limit"),
        **_routing_fields(options),
    )


def routing_request(token_ids: Prompt, model: str, options: RoutingOptions) -> RoutingRequest:
    """Returns the message of a request for routing only.

    Raises:
        BadRequest: an argument has a wrong type or value.
    """
    check_names(options, RoutingOptions)
    return _message(
        RoutingRequest,
        model=_model(model),
        token_ids=_tokens(token_ids),
        **_routing_fields(options),
    )


def _routing_fields(options: RoutingOptions | GenerateOptions) -> dict[str, Any]:
    constraints = dict(_mapping("constraints", options.get("constraints")))
    for name in ("worker_id", "dp_rank"):
        if options.get(name) is not None:
            constraints[name] = options.get(name)
    scope: dict[str, Any] = {name: options.get(name, "") for name in ("lora_name", "cache_salt", "tenant")}
    fields: dict[str, Any] = {
        "overrides": _nested(RoutingOverrides, "router_config_override", options.get("router_config_override")),
        "constraints": _nested(RoutingConstraints, "constraints", constraints),
        "conversation_id": options.get("conversation_id", ""),
        "expected_output_tokens": options.get("expected_output_tokens"),
        "priority": options.get("priority", 0),
    }
    return fields | ({"scope": _message(BlockScope, **scope)} if any(scope.values()) else {})


def _model(model: str) -> str:
    if not model:
        raise BadRequest("no model was named", field="model", advice="Pass model, or name it when making the client.")
    return model


def _tokens(token_ids: Prompt) -> TokenIds:
    """Returns the message of token ids."""
    if isinstance(token_ids, str):
        raise BadRequest("expected token ids, received a str", field="token_ids", advice="Pass text as prompt_text.")
    try:
        if isinstance(token_ids, bytes | memoryview):
            message = _unpacked(memoryview(token_ids))
        else:
            message = TokenIds(ids=token_ids)
    except (TypeError, ValueError, OverflowError, DecodeError):
        # The error of protobuf may have a token.
        raise BadRequest(
            f"expected token ids, received an invalid {type(token_ids).__name__}",
            field="token_ids",
            advice="Pass integers from 0 to 4294967295, or a buffer with 4 bytes for each.",
        ) from None
    if not message.ids:
        raise BadRequest("the prompt is empty", field="token_ids", advice="Pass at least one token id.")
    return message


def _unpacked(buffer: memoryview) -> TokenIds:
    """Parses a buffer, which is faster than filling a message from a list."""
    return TokenIds.FromString(PackedTokenIds(ids=bytes(buffer)).SerializeToString())


def _mapping(field: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadRequest(
            f"expected a dictionary, received {type(value).__name__}", field=field, advice="Pass a dictionary."
        )
    return value


def _nested(kind: type[M], field: str, value: Any) -> M | None:
    fields = {name: each for name, each in _mapping(field, value).items() if each is not None}
    return _message(kind, prefix=f"{field}.", **fields) if fields else None


def _message(kind: type[M], *, prefix: str = "", **fields: Any) -> M:
    """Fills a message field by field, so an error names the field at fault.

    Raises:
        BadRequest: a field does not exist, or its value has a wrong type or is out of range.
    """
    message = kind()
    for name, value in fields.items():
        if value is None:
            continue
        field = f"{prefix}{name}"
        if name not in kind.DESCRIPTOR.fields_by_name:
            known = ", ".join(each.name for each in kind.DESCRIPTOR.fields)
            raise BadRequest(f"{field} does not exist", field=field, advice=f"Use one of: {known}.")
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            raise BadRequest(f"{field} is invalid: {error}", field=field, advice="Correct its value.") from None
    return message
