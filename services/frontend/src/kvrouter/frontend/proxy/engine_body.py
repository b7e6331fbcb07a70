"""The body of a request for an engine's OpenAI API: how it may run, and the forms in which engines get it. Pure.

- A prefill engine gets it with ``max_tokens`` 1, not streamed. vLLM's gets ``kv_transfer_params`` with
  ``do_remote_decode``, and its response has those of the decode engine. SGLang's engines get the same bootstrap fields.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from kvrouter.engines.transfers import START_OF_VLLM_TRANSFER, VLLM_TRANSFER
from kvrouter.v1.worker_pb2 import TransferParams

_SEVERAL = re.compile(rb'\[\s*["\[]')
_ONE_TOKEN = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_OUTPUT = ("stream_options", "min_tokens", "min_completion_tokens")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Shape(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw()
    n: int | None = None
    best_of: int | None = None
    kv_transfer_params: Any = None
    bootstrap_room: Any = None


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape, strict=False)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE = msgspec.json.Decoder(_Response)


def can_share(body: bytes) -> bool:
    """Returns whether a prefill and a decode engine can share it: one prompt, one sequence, no transfer of its own."""
    try:
        shape = _SHAPE.decode(body)
    except _MALFORMED:
        return False
    if max(shape.n or 1, shape.best_of or 1) > 1 or _SEVERAL.match(bytes(shape.prompt)):
        return False
    return shape.kv_transfer_params is None and shape.bootstrap_room is None


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
