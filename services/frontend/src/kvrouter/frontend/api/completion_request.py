"""The body of ``POST /v1/completions``: vLLM's fields, with the prompt as token ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from google.protobuf.message import Message
from kvrouter.core import find_json_value
from kvrouter.frontend.api.json_body import MAX_FIELDS_BYTES, check_uint64, decode_json
from kvrouter.frontend.api.token_list import Prompt, TokenId
from kvrouter.runtime.errors import BadRequest
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest

_UInt32 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_UInt64 = Annotated[int, msgspec.Meta(ge=0)]
"""``check_uint64`` checks the upper bound, which msgspec cannot."""


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides tokens."""

    include_usage: bool = False


class RouterConfigOverride(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Routing options of one request."""

    overlap_score_weight: float | None = None
    router_temperature: float | None = None
    mode: str | None = None
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: _UInt64 | None = None


class CompletionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fields of the body. Fields that only an engine understands are refused instead of silently dropped."""

    model: str
    prompt: msgspec.Raw
    max_tokens: _UInt32 = 16
    min_tokens: _UInt32 = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: _UInt32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: _UInt64 | None = None
    n: Literal[1] = 1
    request_id: str = ""
    priority: _Int32 = 0
    cache_salt: str = ""
    conversation_id: str = ""
    user: str | None = None
    return_token_ids: bool = True
    add_special_tokens: bool = False
    worker_id: _UInt64 | None = None
    dp_rank: _UInt32 | None = None
    router_config_override: RouterConfigOverride = RouterConfigOverride()


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_CONSTRAINTS = ("worker_id", "dp_rank")

# As lenient as pydantic, with which vLLM parses bodies: "5" is accepted where a number is expected.
_FIELDS = msgspec.json.Decoder(CompletionFields, strict=False)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed completion request."""

    fields: CompletionFields
    prompt: Prompt

    @classmethod
    def parse(cls, body: bytes | bytearray, *, max_prompt_tokens: int) -> CompletionRequest:
        """Parses a body. Uses up to four times its size in memory and stops at the first error.

        The prompt is cut out before the other fields are decoded, because the decoder would pass over it as slowly as
        it is parsed.

        Raises:
            BadRequest: it is not JSON, or a field is missing, unknown or out of range; the error names the field.
            PromptTooLong: the prompt has more tokens than ``max_prompt_tokens``.
        """
        prompt: Prompt | None = None
        found = find_json_value(body, "prompt")
        if found is not None:
            start, end = found
            with memoryview(body) as view:
                prompt = Prompt.parse(bytes(view[start:end]), limit=max_prompt_tokens)
                body = b"".join((view[:start], b"[]", view[end:]))
        if len(body) > MAX_FIELDS_BYTES:
            raise BadRequest(
                f"body: {len(body)} bytes besides the prompt; the limit is {MAX_FIELDS_BYTES}",
                advice="Send a single prompt of token ids, and shorter fields.",
            )
        fields = decode_json(_FIELDS, body)
        check_uint64(fields.seed, "seed")
        check_uint64(fields.worker_id, "worker_id")
        threshold = fields.router_config_override.active_prefill_tokens_threshold
        check_uint64(threshold, "router_config_override.active_prefill_tokens_threshold")
        if prompt is None:
            prompt = Prompt.parse(bytes(fields.prompt), limit=max_prompt_tokens)
        return cls(fields, prompt)

    def to_generate(self) -> FrontendServiceGenerateRequest:
        """Returns the request as the Frontend's gRPC contract defines it, without the prompt."""
        fields = self.fields
        # Fields are set in place: a message that is passed to the constructor of another is encoded and decoded.
        request = FrontendServiceGenerateRequest(request_id=fields.request_id, model=fields.model)
        stop = request.stop_conditions
        stop.max_tokens = fields.max_tokens
        stop.min_tokens = fields.min_tokens
        stop.ignore_eos = fields.ignore_eos
        if fields.stop_token_ids:
            stop.stop_token_ids.extend(fields.stop_token_ids)
        _set(request.sampling_options, fields, _SAMPLING)
        _set(request.overrides, fields.router_config_override, RouterConfigOverride.__struct_fields__)
        _set(request.constraints, fields, _CONSTRAINTS)
        if fields.cache_salt:
            request.scope.cache_salt = fields.cache_salt
        request.priority = fields.priority
        request.conversation_id = fields.conversation_id
        return request


def _set(message: Message, fields: msgspec.Struct, names: Iterable[str]) -> None:
    """Sets the fields of a message that are given."""
    for name in names:
        value = getattr(fields, name)
        if value is not None:
            setattr(message, name, value)
