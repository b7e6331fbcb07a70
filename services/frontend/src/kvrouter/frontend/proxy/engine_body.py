"""The body of a request for an engine's OpenAI API: how it may run, and the forms in which engines get it. Pure.

- A prefill engine gets it with ``max_tokens`` 1, not streamed. vLLM's gets ``kv_transfer_params`` with
  ``do_remote_decode``, and its response has those of the decode engine. SGLang's engines get the same bootstrap fields.
- An engine that continues a stream gets the output so far at the end of the prompt.
- A stream may request its usage for the Frontend's own purpose.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from kvrouter.engines.transfers import START_OF_VLLM_TRANSFER, VLLM_TRANSFER
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.v1.worker_pb2 import SamplingOptions, TransferParams

_COMPLETIONS = "/v1/completions"
_TOKEN_LIST = re.compile(rb"\[\s*\d")
_SEVERAL = re.compile(rb'\[\s*["\[]')
_BEGIN_ANEW = (
    *("echo", "stop", "logprobs", "prompt_logprobs", "suffix", "use_beam_search", "truncate_prompt_tokens"),
    *("response_format", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "kv_transfer_params", "bootstrap_room"),
)
"""Fields whose meaning another engine would begin anew, in the middle of the output."""
_ONE_TOKEN = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_OUTPUT = ("stream_options", "min_tokens", "min_completion_tokens")
_FALSY = (b"null", b"false", b"[]", b'""', b"0", b"{}")
_USAGE_REQUESTED = b'"stream_options":{"include_usage":true}'
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Shape(msgspec.Struct):
    stream: bool | None = None
    stream_options: Any = msgspec.UNSET
    return_token_ids: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    kv_transfer_params: Any = None
    bootstrap_room: Any = None

    @property
    def has_several(self) -> bool:
        """Whether it has several sequences of a prompt."""
        return (self.n or 1) > 1 or (self.best_of or 1) > 1


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape, strict=False)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE = msgspec.json.Decoder(_Response)


class EngineBody:
    """A body, decoded once."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._shape: _Shape | None = None
        """None if an engine would refuse it."""
        try:
            self._shape = _SHAPE.decode(body)
        except _MALFORMED:
            return

    @property
    def can_share(self) -> bool:
        """Whether a prefill and a decode engine can share it: one prompt, one sequence, no transfer of its own."""
        shape = self._shape
        if shape is None or shape.has_several or _SEVERAL.match(bytes(shape.prompt)):
            return False
        return shape.kv_transfer_params is None and shape.bootstrap_room is None

    def migration_blocker(self, path: str) -> str:
        """Returns the reason why another engine cannot continue it once it has output; empty if one can."""
        if path != _COMPLETIONS or b'"return_token_ids"' not in self._body:
            return (
                "the tokens of its output are not known, which needs /v1/completions with stream and return_token_ids"
            )
        shape = self._shape
        if shape is None:
            return "its body cannot be read"
        if not shape.stream or not shape.return_token_ids:
            return "it needs stream and return_token_ids"
        if not _TOKEN_LIST.match(bytes(shape.prompt)):
            return "its prompt is not a list of token ids"
        if not shape.max_tokens:
            return "it has no max_tokens"
        if shape.has_several:
            return "it has several sequences"
        if isinstance(shape.stream_options, dict) and shape.stream_options.get("continuous_usage_stats"):
            return "it has continuous_usage_stats"
        fields = _FIELDS.decode(self._body)
        used = [name for name in _BEGIN_ANEW if bytes(fields.get(name, b"null")) not in _FALSY]
        return f"it has {', '.join(used)}" if used else ""

    def sampling_state(self) -> SamplingOptions:
        """Returns the sampling options whose state another engine does not know."""
        shape = self._shape or _Shape()
        options = SamplingOptions(
            frequency_penalty=shape.frequency_penalty or 0.0, presence_penalty=shape.presence_penalty or 0.0
        )
        if shape.seed is not None:
            options.seed = shape.seed % (1 << 64)
        if shape.repetition_penalty is not None:
            options.repetition_penalty = shape.repetition_penalty
        return options

    def with_usage(self) -> bytes | None:
        """Returns the body with a request for the usage of its stream; None for no stream, or one with own options."""
        shape = self._shape
        if shape is None or not shape.stream or shape.stream_options is not msgspec.UNSET:
            return None
        return _with_fields(self._body, _USAGE_REQUESTED)


def prefill_body(body: bytes, params: TransferParams | None) -> bytes:
    """Returns the body for the prefill engine; ``params`` are set if both engines run at the same time."""
    fields = {name: value for name, value in _FIELDS.decode(body).items() if name not in _OF_OUTPUT}
    limits = [name for name in _ONE_TOKEN if name in fields] or ["max_tokens"]
    fields |= dict.fromkeys(limits, msgspec.Raw(b"1"))
    fields["stream"] = msgspec.Raw(b"false")
    if params is None:
        fields["kv_transfer_params"] = msgspec.Raw(json.dumps(START_OF_VLLM_TRANSFER).encode())
    return decode_body(msgspec.json.encode(fields), params)


def decode_body(body: bytes, params: TransferParams | None) -> bytes:
    """Returns the body for the decode engine: the client's with the transfer parameters, if there are any."""
    if params is None:
        return body
    payload = params.payload.strip()
    is_vllm = params.format == VLLM_TRANSFER
    return _with_fields(body, b'"kv_transfer_params":' + payload if is_vllm else payload[1:-1])


def continued_body(body: bytes, prompt: bytes, output_tokens: int) -> bytes:
    """Returns the body for an engine that continues a request.

    Args:
        body: The client's body.
        prompt: The prompt with the output so far, packed.
        output_tokens: Number of tokens of that output; fewer than ``max_tokens``.
    """
    fields: dict[str, Any] = dict(_FIELDS.decode(body))
    fields["prompt"] = encode_token_ids(memoryview(prompt).cast("I"))
    for name, least in (("max_tokens", 1), ("min_tokens", 0)):
        if name in fields and isinstance(value := msgspec.json.decode(fields[name]), int):
            fields[name] = max(least, value - output_tokens)
    return msgspec.json.encode(fields)


def transfer_params(response: bytes | bytearray) -> TransferParams | None:
    """Returns the parameters for the decode engine in a response of the prefill engine; None if there are none."""
    try:
        payload = bytes(_RESPONSE.decode(response).kv_transfer_params)
    except _MALFORMED:
        return None
    return TransferParams(format=VLLM_TRANSFER, payload=payload) if payload not in (b"", b"null") else None


def _with_fields(body: bytes, fields: bytes) -> bytes:
    start = body.index(b"{") + 1
    return b"%b%b,%b" % (body[:start], fields, body[start:])
