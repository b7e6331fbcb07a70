"""Whether a forwarded request can continue on another engine, and its body there. Pure.

A streamed completion of token ids can, if its engine returns token ids: the output so far is added to the prompt.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from kvrouter.frontend.api.token_list import encode_token_ids
from kvrouter.v1.worker_pb2 import SamplingOptions

_COMPLETIONS = "/v1/completions"
_TOKEN_LIST = re.compile(rb"\[\s*\d")
_BEGIN_ANEW = (
    *("echo", "stop", "logprobs", "prompt_logprobs", "suffix", "use_beam_search", "truncate_prompt_tokens"),
    *("response_format", "structured_outputs", "json_schema", "regex", "ebnf", "structural_tag"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "kv_transfer_params", "bootstrap_room"),
)
"""Fields whose meaning another engine would begin anew, in the middle of the output."""


class _StreamOptions(msgspec.Struct):
    continuous_usage_stats: bool | None = None


class _Shape(msgspec.Struct):
    stream: bool | None = None
    return_token_ids: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    stream_options: _StreamOptions | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None


_SHAPE = msgspec.json.Decoder(_Shape, strict=False)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_FALSY = (b"null", b"false", b"[]", b'""', b"0", b"{}")


def why_it_stays(path: str, body: bytes) -> str:
    """Returns why a request cannot continue on another engine once it has output; empty if it can."""
    if path != _COMPLETIONS or b'"return_token_ids"' not in body:
        return "the tokens of its output are not known, which needs /v1/completions with stream and return_token_ids"
    try:
        shape, fields = _SHAPE.decode(body), _FIELDS.decode(body)
    except _MALFORMED:
        return "its body cannot be read"
    if not shape.stream or not shape.return_token_ids:
        return "it needs stream and return_token_ids"
    if not _TOKEN_LIST.match(bytes(shape.prompt)):
        return "its prompt is not a list of token ids"
    if not shape.max_tokens:
        return "it has no max_tokens"
    if (shape.n or 1) > 1 or (shape.best_of or 1) > 1:
        return "it has several sequences"
    if shape.stream_options is not None and shape.stream_options.continuous_usage_stats:
        return "it has continuous_usage_stats"
    used = [name for name in _BEGIN_ANEW if bytes(fields.get(name, msgspec.Raw(b"null"))) not in _FALSY]
    return f"it has {', '.join(used)}" if used else ""


def sampling_state(body: bytes) -> SamplingOptions:
    """Returns the sampling options of which another engine does not know the state."""
    shape = _SHAPE.decode(body)
    options = SamplingOptions(
        frequency_penalty=shape.frequency_penalty or 0.0, presence_penalty=shape.presence_penalty or 0.0
    )
    if shape.seed is not None:
        options.seed = shape.seed % (1 << 64)
    if shape.repetition_penalty is not None:
        options.repetition_penalty = shape.repetition_penalty
    return options


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
