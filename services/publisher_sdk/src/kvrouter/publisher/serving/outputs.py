"""Output of an engine for a request, and its encoding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.net.wire_format import WireType, encode_varint, tag
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, WorkerServiceGenerateResponse

_TOKEN_IDS = tag(GenerateOutput, "token_ids")
_CACHED_TOKENS = tag(GenerateOutput, "cached_tokens", WireType.VARINT)
_FINISH_REASON = tag(GenerateOutput, "finish_reason", WireType.VARINT)
_OUTPUT = tag(WorkerServiceGenerateResponse, "output")

_one_token = struct.Struct("<2sI").pack
_ONE_TOKEN_HEAD = _TOKEN_IDS + b"\x04"
_SHORT_HEADS = [_OUTPUT + bytes((size,)) for size in range(128)]
"""Encoding of a response up to its output, by the size of the output. Nearly all outputs are short."""


@dataclass(slots=True)
class RequestOutput:
    """The output of one request in one step."""

    request_id: str
    token_ids: Sequence[int] = ()
    """Token ids generated since the previous output."""
    finish_reason: FinishReason | None = None
    """Why the request has ended; set in its last output."""
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; set in the first output with tokens."""
    details: GenerateOutput | None = None
    """Further fields, such as log probabilities. Its ``token_ids`` come after those above."""

    def encode(self) -> bytes:
        """Returns the output as an encoded WorkerServiceGenerateResponse.

        Raises:
            struct.error: a token id is no uint32.
        """
        tokens, finish_reason = self.token_ids, self.finish_reason
        count = len(tokens)
        if count == 1:
            body = _one_token(_ONE_TOKEN_HEAD, tokens[0])
        elif count:
            body = _TOKEN_IDS + encode_varint(4 * count) + struct.pack(f"<{count}I", *tokens)
        else:
            body = b""
        if self.cached_tokens is not None:
            body += _CACHED_TOKENS + encode_varint(self.cached_tokens)
        if finish_reason:
            body += _FINISH_REASON + encode_varint(finish_reason)
        if self.details is not None:
            body += self.details.SerializeToString()
        return encode_response(body)


def encode_response(output: bytes) -> bytes:
    """Returns an encoded GenerateOutput as an encoded WorkerServiceGenerateResponse."""
    size = len(output)
    return (_SHORT_HEADS[size] if size < len(_SHORT_HEADS) else _OUTPUT + encode_varint(size)) + output
