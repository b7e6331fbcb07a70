"""The bodies of a forwarded request for a prefill and a decode engine, as the proxies of vLLM and SGLang make them.

The prefill engine gets the request with ``max_tokens`` 1, not streamed. vLLM's gets ``kv_transfer_params`` with
``do_remote_decode``, and its response has those of the decode engine. SGLang's engines get the same bootstrap fields.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
from kvrouter.net.engine_transfers import START_OF_VLLM_TRANSFER, VLLM_TRANSFER
from kvrouter.v1.worker_pb2 import TransferParams

_ONE_TOKEN = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_OUTPUT = ("stream_options", "min_tokens", "min_completion_tokens")
_NOTHING = b"null"


class _Shape(msgspec.Struct):
    n: int | None = None
    best_of: int | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: Any = None
    bootstrap_room: Any = None


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape, strict=False)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE = msgspec.json.Decoder(_Response)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def can_share(body: bytes) -> bool:
    """Returns whether a prefill and a decode engine can share a request: one prompt, one sequence, no own transfer."""
    try:
        shape = _SHAPE.decode(body)
    except _MALFORMED:
        return False
    prompt = bytes(shape.prompt).lstrip()
    several = prompt.startswith(b"[") and prompt[1:].lstrip()[:1] in (b'"', b"[")
    own = shape.kv_transfer_params is not None or shape.bootstrap_room is not None
    return not several and not own and (shape.n or 1) == 1 and (shape.best_of or 1) == 1


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
    added = b'"kv_transfer_params":' + payload if params.format == VLLM_TRANSFER else payload[1:-1]
    start = body.index(b"{") + 1
    return body[:start] + added + b"," + body[start:]


def transfer_params(response: bytes | bytearray) -> TransferParams | None:
    """Returns the parameters for the decode engine in a response of the prefill engine; None if there are none."""
    try:
        payload = bytes(_RESPONSE.decode(response).kv_transfer_params)
    except _MALFORMED:
        return None
    return TransferParams(format=VLLM_TRANSFER, payload=payload) if payload not in (b"", _NOTHING) else None
